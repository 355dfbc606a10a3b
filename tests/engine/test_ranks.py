"""The version transaction over the ranks of one engine, without vLLM (`tests/contract/sharded_engine.py`): all take a policy, or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipelinerl.engine.vllm import ranks
from pipelinerl.errors import ConfigError, NoRoom, WeightsError
from pipelinerl.weights.shared_memory import SharedMemorySender
from pipelinerl.weights.swap import SparseSwap
from tests.contract import sharded_engine
from tests.contract.sharded_engine import ShardedEngine
from tests.contract.weight_transports import LAYOUT, Transport, by_files, same_bits, shared_memory, tensors


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[Transport]:
    made = shared_memory(tmp_path, LAYOUT)
    yield made
    made.pool.close()


@pytest.mark.parametrize(("kind", "said"), [(RuntimeError, "rank 1: out of memory"), (KeyError, r"rank 1: KeyError\('out of memory'\)")])
def test_what_one_rank_cannot_stage_none_takes_and_the_next_policy_all_do(
    transport: Transport, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], said: str
):
    engine = ShardedEngine(transport.receive())
    engine.take(transport.publish(1))

    def fail() -> torch.Tensor:
        raise kind("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor.workers[1]._policy_commit, "spare", fail)
        with pytest.raises(WeightsError, match=said):
            engine.weight_receiver.stage(transport.publish(2))
    with pytest.raises(WeightsError, match="nothing is staged"):
        engine.weight_receiver.commit()
    assert engine.holds(1), "rank 0 had staged its part"
    engine.take(transport.publish(3))
    assert engine.holds(3)


def test_a_rank_that_has_another_staging_ready_ends_the_engine(transport: Transport):
    """Ranks of different versions would sample tokens of neither."""
    engine = ShardedEngine(transport.receive())
    engine.weight_receiver.stage(transport.publish(1))
    engine.executor.workers[1]._policy_staged = None
    with pytest.raises(RuntimeError, match="rank 1 has staging None ready, told to commit staging 1"):
        engine.weight_receiver.commit()


def test_every_rank_makes_its_derived_weights_anew_once_a_policy_is_in_force(transport: Transport, monkeypatch: pytest.MonkeyPatch):
    engine = ShardedEngine(transport.receive())
    held: list[bool] = []
    for worker in engine.executor.workers:
        norm = worker.model.get_parameter("norm")
        monkeypatch.setattr(worker._policy_derived, "make_anew", lambda norm=norm: held.append(same_bits(norm.data, tensors(1)["norm"])))
    engine.take(transport.publish(1))
    assert held == [True, True]


def test_ranks_that_do_not_hold_the_whole_model_between_them_are_refused_at_start(transport: Transport, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sharded_engine.BOXES[1], "embed", [((12, 30), (0, 16)), ((40, 50), (0, 16))])
    said = r"do not hold .* whole between them: .* embed \[50, 16\]: got \[0:12, 0:16\], \[30:38, 0:16\], \[12:30, 0:16\], \[40:50, 0:16\]"
    with pytest.raises(ConfigError, match=said):
        ShardedEngine(transport.receive())


def test_without_room_for_a_whole_policy_the_old_one_serves_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One that comes in a file is made whole in shared memory, for all ranks to read."""
    transport = by_files(tmp_path, LAYOUT)
    engine = ShardedEngine(transport.receive())

    def full(memory: SharedMemorySender, number: int, num_bytes: int) -> None:
        raise NoRoom(f"no room for {num_bytes} bytes")

    with monkeypatch.context() as patch:
        patch.setattr(ranks.SharedMemorySender, "make", full)
        with pytest.raises(NoRoom, match=r"no room for \d+ bytes"):
            engine.weight_receiver.stage(transport.publish(1))
    assert engine.holds(0)
    engine.take(transport.publish(2))
    assert engine.holds(2)
    transport.pool.close()


def test_a_rank_that_scatters_stages_what_differs_and_mends_what_was_damaged(transport: Transport):
    engine = ShardedEngine(transport.receive(), mode="sparse")
    engine.take(transport.publish(1))
    worker = engine.executor.workers[1]
    worker.model.get_parameter("head").data.view(torch.int16)[3, 4] ^= 1
    again = transport.publish(1)
    engine.weight_receiver.stage(again)
    commit = worker._policy_commit
    assert isinstance(commit, SparseSwap)
    assert [len(places) for _, places, _ in commit._changes or ()] == [1]
    engine.weight_receiver.commit()
    assert engine.holds(1)
