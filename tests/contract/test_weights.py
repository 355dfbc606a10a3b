"""What every transport of the weights promises, and the version transaction over each: fetched as published, bit for bit, or refused.

Adapters that travel alone run through the cases that are theirs in `tests/e2e/test_adapters.py`, which has the engine they need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.messages import StageWeights, Tensor
from pipelinerl.weights.base import num_bytes, plan_layout, views
from pipelinerl.weights.delta_base import DeltaBase
from pipelinerl.weights.manifest import Manifest
from pipelinerl.weights.swap import CopySwap, PointerSwap, SparseSwap
from pipelinerl.weights.transport import Receiver
from tests.contract.sharded_engine import ShardedEngine
from tests.contract.weight_transports import BETWEEN_DEVICES, FOR_WHOLE_POLICIES, LAYOUT, TRANSPORTS, Engine, Transport, same_bits, tensors

ENGINES: dict[str, Callable[[Receiver], Engine]] = {
    "pointer": functools.partial(Engine, swap=PointerSwap),
    "copy": functools.partial(Engine, swap=CopySwap),
    "sparse": functools.partial(Engine, swap=SparseSwap),
    "ranks, pointer": functools.partial(ShardedEngine, mode="pointer"),
    "ranks, sparse": functools.partial(ShardedEngine, mode="sparse"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every transport with every kind of engine that the test asks for, but for ranks on a transport between devices: no run begins with
    those.
    """
    kinds = list(ENGINES) if "drifters" in metafunc.fixturenames else ["pointer", "copy", "ranks, pointer"]
    if "engines" in metafunc.fixturenames:
        names = [name for name in TRANSPORTS if "drifters" not in metafunc.fixturenames or name not in FOR_WHOLE_POLICIES]
        of_one_rank = (
            *BETWEEN_DEVICES,
            *FOR_WHOLE_POLICIES,
        )  # the ranks of an engine take shards as `tests/weights/test_sharded.py` has it
        pairs = [(transport, kind) for transport in names for kind in kinds if "ranks" not in kind or transport not in of_one_rank]
        metafunc.parametrize(("transport_name", "kind"), pairs)
    else:
        metafunc.parametrize("transport_name", TRANSPORTS)


@pytest.fixture
def make_transport(transport_name: str, tmp_path: Path) -> Iterator[Callable[[tuple[Tensor, ...]], Transport]]:
    made: list[Transport] = []

    def make(layout: tuple[Tensor, ...]) -> Transport:
        made.append(TRANSPORTS[transport_name](tmp_path, layout))
        return made[-1]

    yield make
    for transport in made:
        transport.pool.close()


@pytest.fixture
def transport(make_transport: Callable[[tuple[Tensor, ...]], Transport]) -> Transport:
    return make_transport(LAYOUT)


@pytest.fixture
def engines(transport: Transport, kind: str) -> Iterator[list[Engine]]:
    """Two of the kinds that take whole policies."""
    made = [ENGINES[kind](transport.receive()) for _ in range(2)]
    yield made
    for engine in made:
        engine.close()


@pytest.fixture
def drifters(engines: list[Engine]) -> list[Engine]:
    """Two of any kind: those that scatter take changes where they are."""
    return engines


@pytest.mark.slow
def test_every_engine_gets_every_policy_bit_for_bit_and_only_at_its_commit(transport: Transport, engines: list[Engine]):
    previous = None
    for version in range(1, 7):
        order = transport.publish(version)
        for engine in engines:
            engine.weight_receiver.stage(order)
            assert engine.holds(version - 1), "staging changes nothing"
        for engine in engines:
            engine.weight_receiver.commit()
            assert engine.holds(version)
        if previous is not None:
            transport.pool.release(previous.buffer)
        previous = order


def test_an_engine_may_skip_policies_and_load_the_newest_late(transport: Transport, engines: list[Engine]):
    first, second, third = (transport.publish(version) for version in (1, 2, 3))
    engines[0].take(first)
    for order in (first, second, third):
        transport.pool.release(order.buffer)
    engines[1].take(third)
    assert engines[1].holds(3), "released or not, the newest stays for whoever comes late"


def test_a_policy_staged_twice_or_staged_over_is_committed_once(transport: Transport, engines: list[Engine]):
    first, second = transport.publish(1), transport.publish(2)
    engine = engines[0]
    for order in (first, first, second):
        engine.weight_receiver.stage(order)
    engine.weight_receiver.commit()
    assert engine.holds(2)
    with pytest.raises(WeightsError, match="nothing is staged"):
        engine.weight_receiver.commit()
    assert engine.holds(2)


def flip_a_bit(buffer: torch.Tensor, manifest: Manifest) -> Manifest:
    buffer[LAYOUT[4].offset_bytes + 5] ^= 64
    return manifest


def claim_another_version(buffer: torch.Tensor, manifest: Manifest) -> Manifest:
    return Manifest(version=9, proofs=manifest.proofs, num_bytes=manifest.num_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (
            flip_a_bit,
            r"1 of 5 tensors of policy 2: head \[16, 50\] bfloat16: digest is [0-9a-f]{32}, published was [0-9a-f]{32}; not taken",
        ),
        (claim_another_version, "holds policy 9, announced was policy 2; not taken"),
    ],
    ids=["flipped bit", "version"],
)
def test_a_damaged_policy_is_refused_the_old_one_stays_and_the_next_is_taken(
    transport: Transport, engines: list[Engine], tamper: Callable[[torch.Tensor, Manifest], Manifest], said: str
):
    engines[0].take(transport.publish(1))
    with pytest.raises(WeightsError, match=said):
        engines[0].weight_receiver.stage(transport.publish(2, tamper=tamper))
    assert engines[0].holds(1)
    with pytest.raises(WeightsError, match="nothing is staged"):
        engines[0].weight_receiver.commit()
    assert engines[0].holds(1)
    engines[0].take(transport.publish(3))
    assert engines[0].holds(3)


def test_a_failed_staging_takes_back_what_was_staged_before(transport: Transport, engines: list[Engine]):
    engines[0].weight_receiver.stage(transport.publish(1))
    with pytest.raises(WeightsError):
        engines[0].weight_receiver.stage(transport.publish(2, tamper=flip_a_bit))
    with pytest.raises(WeightsError, match="nothing is staged"):
        engines[0].weight_receiver.commit()
    assert engines[0].holds(0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda made: made.pop("norm"), r"missing: norm \[16\]"),
        (lambda made: made.update(extra=torch.zeros(3)), r"extra: extra \[3\]"),
        (lambda made: made.update(norm=torch.zeros(4, 4)), r"misshapen: norm is \[4, 4\]"),
        (lambda made: made.update(norm=torch.zeros(16, dtype=torch.bfloat16)), r"norm: got \[16\] bfloat16 .*, expected \[16\] float32"),
    ],
    ids=["missing", "extra", "misshapen", "dtype"],
)
def test_a_policy_of_another_layout_is_refused(
    make_transport: Callable[[tuple[Tensor, ...]], Transport], change: Callable[[dict[str, torch.Tensor]], object], said: str
):
    made = tensors(0)
    change(made)
    engine = Engine((transport := make_transport(plan_layout(made))).receive())
    with pytest.raises(WeightsError, match=said):
        engine.weight_receiver.stage(transport.publish(1))
    assert engine.holds(0)
    engine.close()


def test_an_order_with_another_digest_is_refused(transport: Transport, engines: list[Engine]):
    order = transport.publish(1)
    with pytest.raises(WeightsError, match="announced was abcd"):
        engines[0].weight_receiver.stage(StageWeights(version=1, buffer=order.buffer, digest="abcd"))
    assert engines[0].holds(0)


def test_a_truncated_policy_is_refused_and_harms_no_other_engine(transport: Transport, engines: list[Engine]):
    first, second = transport.publish(1), transport.publish(2)
    transport.damage(second.buffer)
    with pytest.raises(WeightsError, match=r"truncated|holds none|the trainer sends \d+ bytes, the manifest says"):
        engines[0].weight_receiver.stage(second)
    assert engines[0].holds(0)
    engines[1].take(first)
    assert engines[1].holds(1)


def test_a_buffer_of_a_trainer_that_is_gone_is_refused(transport: Transport):
    order = transport.publish(1)
    transport.receive = transport.hasty or transport.receive
    engine = Engine(transport.receive())
    transport.pool.close()
    with pytest.raises(WeightsError, match="cannot"):
        engine.weight_receiver.stage(order)
    assert engine.holds(0)
    engine.close()


@pytest.mark.parametrize("buffer", ["", "nowhere", "../etc/passwd", "pipelinerl-a-0\n", "policy-../../x", "gloo://nowhere"])
def test_a_name_that_is_no_buffer_is_refused(engines: list[Engine], buffer: str):
    with pytest.raises(WeightsError, match="not the name of a weight buffer"):
        engines[0].weight_receiver.stage(StageWeights(version=1, buffer=buffer, digest="ab"))


# --- changes, over every transport --------------------------------------------------------------------------------------------------------


def drifting(num_versions: int) -> list[torch.Tensor]:
    """Policies, whole, of which each changes a few bits of the one before, some of them back."""
    buffers = [torch.zeros(num_bytes(LAYOUT), dtype=torch.uint8)]
    for name, view in views(buffers[0], LAYOUT).items():
        view.copy_(tensors(0)[name])
    generator = torch.Generator().manual_seed(0)
    inside = torch.cat([torch.arange(tensor.offset_bytes, tensor.offset_bytes + tensor.num_bytes) for tensor in LAYOUT])
    for _ in range(num_versions):
        buffer = buffers[-1].clone()
        chosen = inside[torch.randint(0, len(inside), (40,), generator=generator)]
        buffer[chosen] ^= 1 << (chosen % 8).to(torch.uint8)
        buffers.append(buffer)
    return buffers


class Trainer:
    """Publishes changes where it can, as the trainer does."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.delta_base = DeltaBase(LAYOUT)
        self.num_whole = 0

    def publish(self, version: int, buffer: torch.Tensor, *, tamper: Callable[[torch.Tensor], None] | None = None) -> StageWeights:
        free = self.transport.pool.acquire(1.0)
        assert free is not None
        self.delta_base.policy.copy_(buffer)
        manifest = self.delta_base.fill(free.memory, version)
        self.num_whole += manifest.base_version is None
        if tamper is not None:
            tamper(free.memory)
        digest = self.transport.pool.publish(free, manifest)
        return StageWeights(version=version, buffer=free.name, digest=digest)


def holds(engine: Engine, buffer: torch.Tensor) -> bool:
    return all(same_bits(engine.parameters[name].data, expected) for name, expected in views(buffer, LAYOUT).items())


@pytest.mark.slow
def test_changes_lead_every_engine_to_the_same_bits_however_it_lags(transport: Transport, drifters: list[Engine]):
    """Engine 0 takes every policy; engine 1 every second or third, some of them twice; the delta_base follows the slower one."""
    buffers = drifting(12)
    trainer = Trainer(transport)
    held = [0, 0]
    orders: list[StageWeights] = []
    taken_by_both = {1, 3, 4, 7, 9, 10, 12}
    for version in range(1, 13):
        order = trainer.publish(version, buffers[version])
        for number, engine in enumerate(drifters):
            if number == 0 or version in taken_by_both:
                engine.weight_receiver.stage(order)
                assert holds(engine, buffers[held[number]]), "staging changes nothing"
                if version % 3 == 0:
                    engine.weight_receiver.stage(order)
                engine.weight_receiver.commit()
                held[number] = version
                assert holds(engine, buffers[version])
        trainer.delta_base.move(min(held))
        orders.append(order)
        while orders[0].version < min(held):  # a whole policy may be served from the buffer itself
            transport.pool.release(orders.pop(0).buffer)
    assert trainer.num_whole == 1


@pytest.mark.slow
def test_changes_over_another_base_are_refused_and_a_whole_policy_heals(transport: Transport, drifters: list[Engine]):
    buffers = drifting(4)
    trainer, (engine, stranger) = Trainer(transport), drifters
    engine.take(trainer.publish(1, buffers[1]))
    trainer.delta_base.move(1)
    second = trainer.publish(2, buffers[2])
    with pytest.raises(WeightsError, match="changes from policy 1 to 2 do not fit over policy 0, which this engine holds; not taken"):
        stranger.weight_receiver.stage(second)
    assert holds(stranger, buffers[0])
    engine.take(second)
    trainer.delta_base.move(None)
    third = trainer.publish(3, buffers[3])
    for one in (engine, stranger):
        one.take(third)
        assert holds(one, buffers[3])


def test_damaged_changes_are_refused_and_the_next_ones_still_fit(transport: Transport, drifters: list[Engine]):
    buffers = drifting(3)
    trainer, engine = Trainer(transport), drifters[0]
    engine.take(trainer.publish(1, buffers[1]))
    trainer.delta_base.move(1)

    def flip_a_bit(buffer: torch.Tensor) -> None:
        buffer[10] ^= 1

    with pytest.raises(WeightsError, match=r"digest of its \d+ bytes of changes is [0-9a-f]{32}, published was [0-9a-f]{32}; not taken"):
        engine.weight_receiver.stage(trainer.publish(2, buffers[2], tamper=flip_a_bit))
    assert holds(engine, buffers[1])
    engine.take(trainer.publish(3, buffers[3]))
    assert holds(engine, buffers[3]), "policy 2 was never taken: policy 3 holds its changes too"


@pytest.mark.slow
def test_changes_fit_after_a_whole_policy_was_refused(transport: Transport, drifters: list[Engine]):
    """Its bytes had landed beside the model already: what lies there now is no policy to lay changes over."""
    buffers = drifting(5)
    trainer, engine = Trainer(transport), drifters[0]
    for version in (1, 2, 3):
        engine.take(trainer.publish(version, buffers[version]))
        trainer.delta_base.move(version)
    trainer.delta_base.move(None)

    def flip_a_bit(buffer: torch.Tensor) -> None:
        buffer[LAYOUT[4].offset_bytes + 5] ^= 64

    with pytest.raises(WeightsError, match="1 of 5 tensors of policy 4: head"):
        engine.weight_receiver.stage(trainer.publish(4, buffers[4], tamper=flip_a_bit))
    trainer.delta_base.move(3)
    engine.take(trainer.publish(5, buffers[5]))
    assert holds(engine, buffers[5])
    assert trainer.num_whole == 2


def test_an_engine_whose_weights_were_damaged_is_found_out_and_healed(transport: Transport, drifters: list[Engine]):
    """A bit of the weights in force flips, in the model or in the buffer that mirrors it: changes over it would keep it for ever."""
    buffers = drifting(5)
    trainer, engine = Trainer(transport), drifters[0]
    for version in (1, 2, 3):
        engine.take(trainer.publish(version, buffers[version]))
        trainer.delta_base.move(version)
    if isinstance(engine.weight_receiver._swap, SparseSwap):
        engine.parameters["head"].data.view(-1).view(torch.int16)[-1] ^= 1
    else:
        engine.weight_receiver._swap.spare()[LAYOUT[4].offset_bytes] ^= 1
    with pytest.raises(WeightsError, match=r"of 5 tensors of policy 4: head"):
        engine.weight_receiver.stage(trainer.publish(4, buffers[4]))
    trainer.delta_base.move(None)
    engine.take(trainer.publish(5, buffers[5]))
    assert holds(engine, buffers[5])
