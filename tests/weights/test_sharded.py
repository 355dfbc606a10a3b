"""From shard to shard: every layout feeds every layout, no rank has more than its shard, and whoever is lost is named and stops nobody."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch

from pipelinerl.engine.vllm.rank import OWN
from pipelinerl.engine.vllm.ranks import Ranks, RanksReceiver
from pipelinerl.errors import WeightsError
from pipelinerl.messages import StageWeights, Tensor
from pipelinerl.weights import nccl
from pipelinerl.weights.base import itemsize_of, plan_layout, views
from pipelinerl.weights.manifest import compare
from pipelinerl.weights.reshard import Box, whole
from pipelinerl.weights.sharded import relay
from pipelinerl.weights.sharded.digests import add_ranks, add_up, digest_of, manifest_of, seed_of, texts
from pipelinerl.weights.sharded.plan import Piece, num_bytes_of, plan, split
from scripts.bench import road_layouts
from tests.contract import sharded_engine
from tests.contract import weight_transports as transports
from tests.contract.device_stand_ins import StandInNccl
from tests.contract.test_weights_killed import Child
from tests.weights.model_parallel import Grid
from tests.weights.shards import EngineRanks, TrainerRanks, slices
from tests.weights.test_reshard import GRIDS, MODEL, SHARDS

TENSORS = {name: torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16) for name, value in MODEL.items()}
LAYOUT = plan_layout(TENSORS)
POLICY_BYTES = sum(tensor.num_bytes for tensor in LAYOUT)
BUCKET_BYTES = 128
TWO, FOUR = Grid(tensor=2), Grid(tensor=2, expert=2)


def digest_of_piece(piece: Piece, data: torch.Tensor) -> bytes:
    return digest_of(data.numpy(), seed=seed_of(piece))


def boxes(grid: Grid) -> list[dict[str, list[Box]]]:
    return [{name: [box] for name, box in held.items()} for held in SHARDS[grid]]


def version(number: int) -> dict[str, torch.Tensor]:
    return {name: (tensor.view(torch.int16) + number).view(torch.bfloat16) for name, tensor in TENSORS.items()}


@pytest.mark.parametrize("trainer", GRIDS[:: len(GRIDS) // 6], ids=str)
def test_every_piece_reaches_every_rank_that_needs_it_in_buckets_of_bounded_bytes_and_counts_once(trainer: Grid):
    tensors = {tensor.name: tensor for tensor in LAYOUT}
    for engine in GRIDS[::5]:
        plans = plan(LAYOUT, sources=SHARDS[trainer], targets=boxes(engine), bucket_bytes=BUCKET_BYTES)
        sent, received = [], [[] for _ in range(engine.ranks)]
        filled = {name: [np.zeros_like(MODEL[name]) for _ in range(engine.ranks)] for name in MODEL}
        for own in plans:
            memory = torch.zeros(own.num_bytes, dtype=torch.uint8)
            for piece in own.pieces:
                data = TENSORS[piece.name][slices(piece.box)].contiguous().view(-1).view(torch.uint8)
                memory[piece.first_byte : piece.first_byte + len(data)] = data
                sent.append((piece, digest_of_piece(piece, data)))
            for target, buckets in enumerate(own.buckets):
                for bucket in buckets:
                    assert bucket.num_bytes <= max(BUCKET_BYTES, 2)
                    for piece in bucket.pieces:
                        first = bucket.first_byte + piece.first_byte
                        data = memory[first : first + num_bytes_of(piece, tensors[piece.name])]
                        shape = [end - first for first, end in piece.box]
                        filled[piece.name][target][slices(piece.box)] = data.view(torch.int16).view(shape).numpy().view(np.uint16)
                        received[target].append((piece, digest_of_piece(piece, data.contiguous())))
        for rank, held in enumerate(SHARDS[engine]):
            for name, box in held.items():
                assert np.array_equal(filled[name][rank][slices(box)], MODEL[name][slices(box)])
        manifest = manifest_of(1, add_up(sent), LAYOUT)
        compare(manifest, texts(add_ranks(map(add_up, received)), LAYOUT), name="here")


def test_sums_do_not_hang_on_who_holds_what_and_change_with_every_byte_and_place():
    one = Piece(name="w", box=((0, 2),))
    other = Piece(name="w", box=((2, 4),))
    data = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    together = add_up([(one, digest_of_piece(one, data)), (other, digest_of_piece(other, data))])
    apart = add_ranks([add_up([(other, digest_of_piece(other, data))]), add_up([(one, digest_of_piece(one, data))])])
    assert together == apart
    assert digest_of_piece(one, data) != digest_of_piece(other, data), "the same bytes elsewhere"
    assert digest_of_piece(one, data) != digest_of_piece(one, data.flip(0))
    copy = Piece(name="w", box=((0, 2),), is_counted=False)
    assert add_up([(one, b"\5"), (copy, b"\5")]) == {"w": 5}, "what several hold counts once"


def test_boxes_are_cut_along_their_first_dimensions_into_what_fits():
    assert list(split(((0, 4), (0, 6)), most=12)) == [((0, 2), (0, 6)), ((2, 4), (0, 6))]
    assert list(split(((0, 2), (1, 6)), most=3)) == [((0, 1), (1, 4)), ((0, 1), (4, 6)), ((1, 2), (1, 4)), ((1, 2), (4, 6))]
    assert list(split((), most=1)) == [()]


@pytest.mark.parametrize(("trainer", "engine"), [("fsdp", "tensor"), ("expert", "pipeline"), ("tensor", "expert")])
def test_no_rank_holds_or_sends_more_than_its_share(trainer: str, engine: str):
    layout = road_layouts.layout_of(16 << 20)
    sources = road_layouts.shards_of(layout, road_layouts.Grid(**{trainer: 8}))
    targets = [{name: [box] for name, box in held.items()} for held in road_layouts.shards_of(layout, road_layouts.Grid(**{engine: 8}))]
    plans = plan(layout, sources=sources, targets=targets)
    policy = sum(tensor.num_bytes for tensor in layout)
    sizes = {tensor.name: itemsize_of(tensor) for tensor in layout}
    for own, held in zip(plans, sources, strict=True):
        shard = sum(sizes[name] * int(np.prod([end - first for first, end in box])) for name, box in held.items())
        assert own.num_bytes <= 1.001 * shard
        received = [sum(sizes[name] * int(np.prod([end - first for first, end in box])) for name, (box,) in one.items()) for one in targets]
        assert sum(bucket.num_bytes for sent in own.buckets for bucket in sent) <= 1.2 * max(policy / 8, *received)


def test_engines_whose_ranks_do_not_hold_the_model_once_are_refused():
    targets = [{"w": [((0, 3),)]}, {"w": [((2, 4),)]}]
    layout = plan_layout({"w": torch.zeros(4)})
    with pytest.raises(WeightsError, match=r"an engine's ranks, of 2, do not hold the model whole and once: .* \[0:3\], \[2:4\]"):
        plan(layout, sources=[{"w": whole((4,))}], targets=targets)


# --- over gloo ----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def trainer() -> Iterator[TrainerRanks]:
    ranks = TrainerRanks(LAYOUT, sources=SHARDS[FOUR], targets=boxes(TWO), bucket_bytes=BUCKET_BYTES, deadline_s=3.0)
    yield ranks
    ranks.close()


@pytest.fixture
def engines() -> Iterator[list[EngineRanks]]:
    made = [EngineRanks(LAYOUT, boxes(TWO), bucket_bytes=BUCKET_BYTES, deadline_s=3.0, who=f"engine {number}") for number in range(2)]
    yield made
    for engine in made:
        engine.close()


def test_engines_take_every_policy_bit_for_bit_and_the_trainer_sends_each_once(trainer: TrainerRanks, engines: list[EngineRanks]):
    for number in (1, 2, 3):
        before = sum(rank.num_sent for rank in trainer.ranks)
        name, digest = trainer.publish(number, version(number), number=number % 2)
        for engine in engines:
            assert engine.fetch(name, digest) == number
            assert engine.holds(version(number))
        assert sum(rank.num_sent for rank in trainer.ranks) - before < 1.4 * POLICY_BYTES, "norms go to both, the rest to one each"
    assert all(rank.num_relayed for rank in engines[0].ranks)
    assert not any(rank.num_relayed for rank in engines[1].ranks)


def test_ranks_of_an_engine_each_take_their_own_shard_and_commit_together():
    """As vLLM's ranks do: two things fused, cut unevenly; held by both, or by one alone; cut by columns."""
    trainer = TrainerRanks(
        transports.LAYOUT,
        sources=[{tensor.name: whole(tuple(tensor.shape)) for tensor in transports.LAYOUT}],
        targets=sharded_engine.BOXES,
        sends_changes=True,
    )
    engine = sharded_engine.ShardedEngine(cast(Any, None))
    ranks = cast(Any, engine.weight_receiver._verify).__self__
    engine.weight_receiver._receiver = receiver = RanksReceiver(ranks)
    try:
        for number in (1, 2, 3):
            name, digest = trainer.publish(number, transports.tensors(number), number=number % 2)
            engine.weight_receiver.stage(StageWeights(version=number, buffer=name, digest=digest))
            assert engine.holds(number - 1), "staging changes nothing"
            engine.weight_receiver.commit()
            assert engine.holds(number)
        before = trainer.ranks[0].num_sent
        changed, digest_of_changed = trainer.publish(4, transports.tensors(3), base=3)
        engine.weight_receiver.stage(StageWeights(version=4, buffer=changed, digest=digest_of_changed))
        engine.weight_receiver.commit()
        assert engine.holds(3)
        assert trainer.ranks[0].num_sent - before < 0.1 * POLICY_BYTES, "each rank has laid what changed, nothing, over its own shard"
        trainer.ranks[0]._held[1].memory[3] ^= 1
        with pytest.raises(WeightsError, match=r"rank 0: .* from trainer rank 0 at .*: digest is"):
            engine.weight_receiver.stage(StageWeights(version=3, buffer=name, digest=digest))
        with pytest.raises(WeightsError, match="nothing is staged"):
            engine.weight_receiver.commit()
        assert engine.holds(3)
    finally:
        receiver.close()
        for worker in engine.executor.workers:
            assert worker._policy_target is not None
            worker._policy_target.close()
        trainer.close()


def test_adapters_are_taken_once_into_memory_that_all_ranks_of_an_engine_read():
    shapes = {"base_model.model.q_proj.lora_A.weight": (4, 6), "base_model.model.q_proj.lora_B.weight": (6, 4)}
    adapters = {name: torch.randn(shape) for name, shape in shapes.items()}
    layout = plan_layout(adapters)
    halves: list[dict[str, Box]] = [
        {name: ((2 * rank, 2 * rank + 2), (0, shape[1])) for name, shape in shapes.items()} for rank in range(2)
    ]
    halves[1]["base_model.model.q_proj.lora_B.weight"] = ((2, 6), (0, 4))
    trainer = TrainerRanks(layout, sources=halves, targets=[{name: [whole(shape)] for name, shape in shapes.items()}])
    ranks = Ranks(sharded_engine.Executor())
    ranks.set_layout(layout, num_ranks=2)
    ranks.verified = "what another transport brought"
    receiver = RanksReceiver(ranks, layout=layout)
    try:
        name, digest = trainer.publish(1, adapters)
        payload = receiver.fetch(name, digest, lambda manifest: ranks.spare())
        assert payload.is_verified
        assert ranks.verified == OWN
        for tensor_name, view in views(ranks.spare(), layout).items():
            assert torch.equal(view, adapters[tensor_name])
    finally:
        receiver.close()
        trainer.close()


def test_shards_travel_by_nccl_through_the_same_code():
    library = StandInNccl()
    trainer = TrainerRanks(LAYOUT, sources=SHARDS[FOUR], targets=boxes(TWO), connect=lambda: nccl.connector(library), carrier="nccl")
    engines = [EngineRanks(LAYOUT, boxes(TWO), connect=lambda: nccl.connector(library), who=f"engine {number}") for number in range(2)]
    try:
        for number in (1, 2):
            name, digest = trainer.publish(number, version(number))
            assert name.startswith("sharded+nccl://")
            assert [engine.fetch(name, digest) for engine in engines] == [number, number]
            assert all(engine.holds(version(number)) for engine in engines)
    finally:
        for end in (*engines, trainer):
            end.close()


def test_an_engine_that_cannot_relay_is_passed_over(trainer: TrainerRanks, engines: list[EngineRanks], caplog: pytest.LogCaptureFixture):
    name, digest = trainer.publish(1, version(1))
    engines[0].fetch(name, digest)
    engines[0].close()
    assert engines[1].fetch(name, digest) == 1
    assert engines[1].holds(version(1))
    assert "engine 1, rank 0 takes a policy from the trainer, because another engine did not pass it on" in caplog.text


def test_an_engine_that_has_gone_on_to_another_policy_says_so_at_once(
    trainer: TrainerRanks, engines: list[EngineRanks], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """And not when whoever asked has given up: one of two engines that were killed took the policy a minute late."""
    monkeypatch.setattr(relay, "BEGIN_S", 0.1)
    name, digest = trainer.publish(1, version(1))
    engines[0].fetch(name, digest)
    newer, its_digest = trainer.publish(2, version(2), number=1)
    engines[0].fetch(newer, its_digest)
    assert engines[1].fetch(name, digest) == 1
    assert engines[1].holds(version(1))
    assert "did not pass it on" in caplog.text
    assert "imed out" not in caplog.text


def test_a_damaged_piece_is_refused_by_name_and_by_the_rank_that_sent_it(trainer: TrainerRanks, engines: list[EngineRanks]):
    name, digest = trainer.publish(1, version(1))
    trainer.ranks[3]._held[0].memory[5] ^= 1
    with pytest.raises(WeightsError, match=r"from trainer rank 3 at 127\.0\.0\.1:\d+: digest is [0-9a-f]{32}, published was"):
        engines[0].fetch(name, digest)
    name, digest = trainer.publish(2, version(2))
    assert engines[0].fetch(name, digest) == 2, "the next is taken"
    assert engines[0].holds(version(2))


def test_damage_on_the_way_through_an_engine_is_found_and_mended_by_the_trainer(trainer: TrainerRanks, engines: list[EngineRanks]):
    name, digest = trainer.publish(1, version(1))
    engines[0].fetch(name, digest)
    engines[0].memory[1][7] ^= 1
    assert engines[1].fetch(name, digest) == 1
    assert engines[1].holds(version(1))


def test_values_that_a_rank_swapped_before_sealing_miss_the_announced_digest(trainer: TrainerRanks, engines: list[EngineRanks]):
    """Every piece has the digest that its sender took; only the sums tell that it is not what was published."""
    name, digest = trainer.publish(1, version(1))
    held = trainer.ranks[0]._held[0]
    held.memory[0] ^= 1
    trainer.ranks[0].seal(0, 1)
    with pytest.raises(WeightsError, match=r"1 of \d+ tensors of policy 1: .*digest is [0-9a-f]{32}, published was"):
        engines[0].fetch(name, digest)


def test_a_trainer_rank_that_is_gone_is_named_at_once(trainer: TrainerRanks, engines: list[EngineRanks]):
    name, digest = trainer.publish(1, version(1))
    trainer.ranks[3].close()
    with pytest.raises(WeightsError, match=r"cannot fetch a policy from trainer rank 3 at 127\.0\.0\.1:\d+: .*not taken"):
        engines[0].fetch(name, digest)


@pytest.mark.slow
def test_a_weight_buffer_that_is_being_written_is_refused(trainer: TrainerRanks, engines: list[EngineRanks]):
    name, _ = trainer.publish(1, version(1))
    next(trainer.ranks[2].views(0))
    with pytest.raises(WeightsError, match=r"from trainer rank 2 .*: its weight buffer holds none; not taken"):
        engines[0].ranks[0].fetch(name, engines[0].memory[0])


# --- processes ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_stopped", [False, True], ids=["killed", "stopped"])
def test_an_engine_that_dies_half_way_frees_the_others_within_their_deadline(is_stopped: bool):
    """The other engine waits for it to pass the policy on: it gets all of it from the trainer instead, and so does the next policy."""
    deadline_s = 2.0
    layout = plan_layout({"w": torch.zeros(1 << 12, 64)})
    tensors = {"w": torch.arange(1 << 18, dtype=torch.float32).view(1 << 12, 64)}
    sources = [{"w": ((part << 10, (part + 1) << 10), (0, 64))} for part in range(4)]
    targets = [{"w": [whole((1 << 12, 64))]}]

    def die_half_way(hear: Callable[[], list[str]], say: Callable[[str], None]) -> None:
        engine = EngineRanks(layout, targets, bucket_bytes=1 << 14, deadline_s=deadline_s, who="engine 0")
        say("ready")
        name, _ = hear()
        (rank,) = engine.ranks
        put: Callable[..., None] = rank._put
        count = 0

        def put_and_die(*arguments: object, **named: object) -> None:
            nonlocal count
            put(*arguments, **named)
            count += 1
            if count == 20:
                say("half way")
                if is_stopped:
                    time.sleep(60)
                os.kill(os.getpid(), 9)

        setattr(rank, "_put", put_and_die)  # noqa: B010  # the type is that of the method
        rank.fetch(name, engine.memory[0])

    child = Child(die_half_way)
    trainer = TrainerRanks(layout, sources=sources, targets=targets, bucket_bytes=1 << 14, deadline_s=deadline_s)
    other = EngineRanks(layout, targets, bucket_bytes=1 << 14, deadline_s=deadline_s, who="engine 1")
    try:
        assert child.hear() == "ready"
        name, digest = trainer.publish(1, tensors)
        child.tell([name, digest])
        assert child.hear() == "half way"
        started = time.monotonic()
        assert other.fetch(name, digest) == 1
        assert other.holds(tensors)
        assert time.monotonic() - started < 2 * deadline_s + 2
        name, digest = trainer.publish(2, tensors, number=1)
        assert other.fetch(name, digest) == 2
    finally:
        child.close()
        other.close()
        trainer.close()


def test_layouts_of_the_bench_hold_a_model_whole():
    layout: tuple[Tensor, ...] = road_layouts.layout_of(1 << 20)
    for grid in (road_layouts.Grid(fsdp=8), road_layouts.Grid(tensor=2, expert=2, pipeline=2), road_layouts.Grid(expert=4, tensor=2)):
        held = [{name: [box] for name, box in one.items()} for one in road_layouts.shards_of(layout, grid)]
        assert plan(layout, sources=[{tensor.name: whole(tuple(tensor.shape)) for tensor in layout}], targets=held)
