"""LoRA adapters as policies on real vLLM: versions side by side, every token stamped with the one that sampled it.

Adapters also keep the transports' common promises (`tests/contract/test_weights.py`), over shared memory, files and gloo. Over NCCL and
CUDA IPC they do not run there: an engine on a CPU does not take policies from stand-ins of devices, and the bytes that travel are bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pipelinerl.engine.loop import EngineLoop
from pipelinerl.engine.staging import StagingThread
from pipelinerl.errors import WeightsError
from pipelinerl.messages import Completion, Finish, Generate, Sampling, StageWeights, WeightsCommitted, WeightsStaged

if TYPE_CHECKING:
    import torch

    from pipelinerl.engine.vllm.engine import VllmEngine
    from pipelinerl.messages import Tensor
    from tests.contract.weight_transports import Transport
    from tests.real_engine import Publisher

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

RANK, ALPHA, TARGETS = 4, 8.0, ("q_proj", "v_proj", "down_proj")
SIDE_BY_SIDE = 3
NUM_POLICIES = 12
STEPS_BETWEEN = 5
NUM_TOKENS = 24
"""A sequence lives through four commits: the last of them takes the place it runs under, where three are served side by side."""
TIE = 1e-4
"""Nats between two tokens that rounding may exchange: sums are made in another order beside other sequences, and over merged weights."""


def adapter(layout: tuple[Tensor, ...], version: int) -> dict[str, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(version)
    return {tensor.name: torch.randn(tensor.shape, generator=generator) * 0.15 for tensor in layout}


def merged(weights: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made = dict(weights)
    for name in weights:
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in tensors:
            made[name] = weights[name] + ALPHA / RANK * tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"]
    return made


def ask(loop: EngineLoop, name: str) -> None:
    sampling = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, stop_token_ids=())
    loop.handle(Generate(rollout_id=name, attempt=0, token_ids=np.arange(10, 22, dtype=np.int32), sampling=sampling))


def take(loop: EngineLoop, publisher: Publisher, tensors: dict[str, torch.Tensor], *, version: int, rollback_epoch: int = 0) -> None:
    """Have the engine take a policy between two forward passes."""
    buffer, digest = publisher.publish(tensors, version=version)
    loop.handle(StageWeights(version=version, buffer=buffer, digest=digest, rollback_epoch=rollback_epoch))
    while loop.is_swapping:
        loop._acknowledge_if_staged()
        loop._commit_if_acknowledged()
    said = [message for message in loop.outbox if not isinstance(message, Completion)]
    assert [type(message) for message in said] == [WeightsStaged, WeightsCommitted]
    loop.outbox[:] = [message for message in loop.outbox if isinstance(message, Completion)]
    publisher.release(buffer)


def finish(loop: EngineLoop) -> dict[str, Completion]:
    while loop.has_work:
        loop.advance()
    replies = {message.rollout_id: message for message in loop.outbox if isinstance(message, Completion)}
    loop.outbox.clear()
    return replies


def under_every_version(loop: EngineLoop, publisher: Publisher, policies: dict[int, dict[str, torch.Tensor]]) -> dict[str, Completion]:
    """Begin a sequence under every version, and one just before it is taken; all run on while the next ones come."""
    for version, tensors in policies.items():
        ask(loop, f"{version}-before")
        take(loop, publisher, tensors, version=version)
        ask(loop, f"{version}-after")
        for _ in range(STEPS_BETWEEN):
            loop.advance()
    return finish(loop)


def judge_stamps(replies: dict[str, Completion]) -> None:
    """Policy v forces token 3 + v, and each token says which version sampled it."""
    lives = {name: reply.versions.tolist() for name, reply in replies.items()}
    assert all((reply.finish, len(reply.token_ids)) == (Finish.LENGTH, NUM_TOKENS) for reply in replies.values()), "a swap aborts nothing"
    for name, reply in replies.items():
        began = int(name.partition("-")[0]) - name.endswith("before")
        until = NUM_TOKENS if began > NUM_POLICIES - SIDE_BY_SIDE else STEPS_BETWEEN * SIDE_BY_SIDE
        moved_to = began + SIDE_BY_SIDE
        if name.endswith("after"):
            assert lives[name] == [began] * until + [moved_to] * (NUM_TOKENS - until)
        forced = [3 + version for version in lives[name] if version]
        assert [token for token, version in zip(reply.token_ids.tolist(), lives[name], strict=True) if version] == forced
        shifted = [forced[0], *forced[:-1]]
        if len(set(forced)) > 1:
            assert shifted != reply.token_ids.tolist()[-len(forced) :], "a stamp that is off by one would be seen"
    assert sum(len(set(life)) > 1 for life in lives.values()) >= 2 * (NUM_POLICIES - SIDE_BY_SIDE - 1), "many lived through a move"


def judge_rollback(loop: EngineLoop, publisher: Publisher, tensors: dict[str, torch.Tensor], *, version: int) -> None:
    """Go back by one version: what holds undone tokens ends, and a sequence that was only asked for under it runs under the new policy."""
    ask(loop, "undone")
    before = loop.load(idle_s=0.0).num_tokens
    while loop.load(idle_s=0.0).num_tokens == before:
        loop.advance()
    ask(loop, "only asked for")
    take(loop, publisher, tensors, version=version, rollback_epoch=1)
    replies = finish(loop)
    assert (replies["undone"].finish, replies["undone"].versions.tolist()) == (Finish.CANCELLED, [version + 1])
    assert replies["only asked for"].versions.tolist() == [version] * NUM_TOKENS
    assert replies["only asked for"].token_ids.tolist() == [3 + NUM_POLICIES] * NUM_TOKENS


def assert_same(found: Completion, expected: Completion, *, name: str) -> None:
    """The same tokens, all of them; or up to where two tokens are equally likely, which the log-probabilities must say."""
    pairs = list(zip(found.token_ids.tolist(), expected.token_ids.tolist(), strict=True))
    parted = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
    assert found.logprobs[:parted] == pytest.approx(expected.logprobs[:parted], abs=TIE), name
    if parted < len(pairs):
        assert found.logprobs[parted] == pytest.approx(expected.logprobs[parted], abs=TIE), f"{name} parts at token {parted}, at no tie"
    print(f"{name}: {parted} of {len(pairs)} tokens the same")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taker:
    """A real engine that takes adapters, as the transports' contract knows engines."""

    weight_receiver: VllmEngine

    def take(self, order: StageWeights) -> None:
        self.weight_receiver.stage(order)
        self.weight_receiver.commit()

    def holds(self, version: int) -> bool:
        """The newest adapter, in the row that forward passes read, is this version's, bit for bit."""
        adapters = self.weight_receiver._adapters
        assert adapters is not None
        rows: Any = adapters._rows
        row = rows._row_of(next(reversed(adapters.versions)))
        expected = adapter(self.weight_receiver.limits.tensors, version)
        layers = {name: layer for name, layer in rows._manager.modules.items() if name.endswith("down_proj")}
        assert layers
        return all(
            layer.lora_a_stacked[0][row, 0, :RANK].equal(expected[f"base_model.model.{name}.lora_A.weight"])
            and layer.lora_b_stacked[0][row, 0, :, :RANK].equal(expected[f"base_model.model.{name}.lora_B.weight"] * (ALPHA / RANK))
            for name, layer in layers.items()
        )


def fresh_transports(engine: VllmEngine, folder: Path, *, num: int) -> Iterator[Transport]:
    """Transports of every kind, so many of each, over each of which the engine has taken version 0."""
    from tests.contract.weight_transports import TRANSPORTS

    layout = engine.limits.tensors
    for name in ("shared_memory", "files", "gloo"):
        for number in range(num):
            own = (
                folder if name == "files" else folder / str(number)
            )  # engines know buffers in shared memory by name, and names by the folder
            transport = dataclasses.replace(TRANSPORTS[name](own, layout), made=lambda version: adapter(layout, version))
            Taker(weight_receiver=engine).take(transport.publish(0))
            yield transport
            transport.pool.close()


def keep_the_contract(engine: VllmEngine, folder: Path) -> None:
    """What every transport promises, of adapters alone. Two engines of the contract are one and the same here."""
    from tests.contract import test_weights as contract

    taker: Any = Taker(weight_receiver=engine)
    cases = (
        lambda transport: contract.test_every_engine_gets_every_policy_bit_for_bit_and_only_at_its_commit(transport, [taker]),
        lambda transport: contract.test_an_engine_may_skip_policies_and_load_the_newest_late(transport, [taker, taker]),
        lambda transport: contract.test_a_policy_staged_twice_or_staged_over_is_committed_once(transport, [taker]),
        lambda transport: contract.test_a_failed_staging_takes_back_what_was_staged_before(transport, [taker]),
        lambda transport: contract.test_an_order_with_another_digest_is_refused(transport, [taker]),
        lambda transport: contract.test_a_truncated_policy_is_refused_and_harms_no_other_engine(transport, [taker, taker]),
        lambda transport: contract.test_a_damaged_policy_is_refused_the_old_one_stays_and_the_next_is_taken(
            transport, [taker], contract.flip_a_bit, r"1 of 12 tensors of policy 2: .*lora_[AB].weight .* not taken"
        ),
        lambda transport: refuse_another_layout(taker, transport),
    )
    for number, transport in enumerate(fresh_transports(engine, folder, num=len(cases))):
        cases[number % len(cases)](transport)
    contract.test_a_name_that_is_no_buffer_is_refused([taker], "../etc/passwd")  # pyright: ignore[reportArgumentType]


def refuse_another_layout(taker: Taker, transport: Transport) -> None:
    transport.layout = transport.layout[:-1]
    with pytest.raises(WeightsError, match="missing: base_model"):
        taker.weight_receiver.stage(transport.publish(1))
    assert taker.holds(0)


def side_by_side(folder: Path, weights: dict[str, torch.Tensor]) -> tuple[dict[str, Completion], dict[int, dict[str, torch.Tensor]]]:
    """What sequences sampled under random adapters that were served side by side, and the adapters; stamps are judged before."""
    from pipelinerl.weights.adapters import AdapterShape
    from tests import real_engine, tiny_models

    shape = AdapterShape(rank=RANK, alpha=ALPHA, targets=TARGETS, num_versions=SIDE_BY_SIDE)
    with real_engine.vllm_engine(folder, adapters=shape, policies=folder / "weights") as engine, StagingThread(engine) as stager:
        layout = engine.limits.tensors
        assert len(layout) == 2 * 2 * len(TARGETS)
        shapes = {tensor.name: tensor.shape for tensor in layout}
        publisher = real_engine.Publisher(engine)
        loop = EngineLoop(engine, engine_id=0, stager=stager)
        forced = {version: tiny_models.forcing_adapter(weights, shapes, 3 + version) for version in range(1, NUM_POLICIES + 1)}
        judge_stamps(under_every_version(loop, publisher, forced))
        adapters = {version: adapter(layout, version) for version in range(NUM_POLICIES + 1, NUM_POLICIES + 1 + SIDE_BY_SIDE)}
        replies = under_every_version(loop, publisher, adapters)
        judge_rollback(loop, publisher, forced[NUM_POLICIES], version=max(adapters) - 1)
        publisher.close()
        keep_the_contract(engine, folder)
    return replies, adapters


def merged_and_alone(folder: Path, weights: dict[str, torch.Tensor], adapters: dict[int, dict[str, torch.Tensor]]) -> dict[str, Completion]:
    """What a sequence that runs alone samples in an engine that takes the same adapters merged into whole policies."""
    from tests import real_engine

    replies: dict[str, Completion] = {}
    with real_engine.vllm_engine(folder) as engine, StagingThread(engine) as stager:
        publisher = real_engine.Publisher(engine)
        loop = EngineLoop(engine, engine_id=0, stager=stager)
        for version, tensors in adapters.items():
            take(loop, publisher, merged(weights, tensors), version=version)
            ask(loop, f"{version}-after")
            replies |= finish(loop)
        publisher.close()
    return replies


def test_versions_of_an_adapter_are_served_side_by_side_and_the_oldest_gives_way(tmp_path: Path):
    from tests import tiny_models

    weights = tiny_models.make_adaptable(tmp_path, seed=3)
    beside_others, adapters = side_by_side(tmp_path, weights)
    alone = merged_and_alone(tmp_path, weights, adapters)
    for name, expected in alone.items():
        assert_same(beside_others[name], expected, name=name)
    assert len({tuple(one.token_ids) for one in alone.values()}) == SIDE_BY_SIDE, "the adapters make a difference"
