"""An engine whose model is spread over two ranks takes policies as one does that holds it whole: each rank its part, all at once."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipelinerl.engine.loop import EngineLoop
from pipelinerl.engine.staging import StagingThread
from pipelinerl.messages import Completion, StageWeights, Tensor, WeightsCommitted, WeightsRefused, WeightsStaged
from pipelinerl.weights.shared_names import FOLDER
from tests import processes
from tests.e2e.test_adapters import (
    ALPHA,
    NUM_POLICIES,
    RANK,
    SIDE_BY_SIDE,
    TARGETS,
    adapter,
    ask,
    assert_same,
    finish,
    judge_rollback,
    judge_stamps,
    merged,
    take,
    under_every_version,
)
from tests.e2e.test_canary import forced_token, judge, swap_under_way

if TYPE_CHECKING:
    import torch

    from pipelinerl.engine.vllm.engine import VllmEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # In the ranks, which are forked: an error there would leave the others waiting.
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),  # vLLM sends what it has pickled
    pytest.mark.filterwarnings("ignore:`torch.distributed.all_gather_into_tensor` is deprecated:FutureWarning"),  # vLLM calls it
]

Weights = dict[str, "torch.Tensor"]


@pytest.fixture(autouse=True)
def vllm_leaves_nothing_in_shared_memory() -> Iterator[None]:
    """Not even of an engine that lost a rank. What Python's tracker knows (`psm_...`) goes with the process."""
    before = set(FOLDER.glob("vllm_dist_*"))
    yield
    processes.wait_until(lambda: set(FOLDER.glob("vllm_dist_*")) <= before, what="buffers of vLLM's ranks stay in shared memory")


def said_of(loop: EngineLoop, what: StageWeights) -> list[type]:
    loop.handle(what)
    while loop.is_swapping:
        loop.advance()
    said = [message for message in loop.outbox if not isinstance(message, Completion)]
    loop.outbox.clear()
    print(said)
    return [type(message) for message in said]


def refuse(engine: VllmEngine, loop: EngineLoop, weights: Weights) -> None:
    """A policy that is not the one announced leaves the one before in force."""
    from tests import real_engine

    before = loop.version
    with contextlib.closing(real_engine.Publisher(engine)) as publisher:
        buffer, _ = publisher.publish(weights, version=before + 1)
        assert said_of(loop, StageWeights(version=before + 1, buffer=buffer, digest="ab")) == [WeightsRefused]
    assert loop.version == before


def take_changes(engine: VllmEngine, loop: EngineLoop, weights: Weights, *, folder: Path, transport: str) -> None:
    """Have it take a policy over a transport whole, and then, as changes, one of which a few of the weights differ: `weights` at last."""
    from trainer.weights.publisher import Publisher

    publisher = Publisher(
        lambda: weights, tied_names=frozenset(), run_folder=folder, deadline_s=10.0, address="127.0.0.1", sends_deltas=True
    )
    publisher.fix_layout(engine.limits.tensors, num_engines=4, transport=transport)
    sizes = []
    with contextlib.closing(publisher):
        for factor in (1.0, 1.5):
            for tensor in weights.values():
                tensor.view(-1)[::50] *= factor
            policy = publisher.publish(loop.version + 1)
            assert policy is not None
            what = StageWeights(version=policy.version, buffer=policy.buffer, digest=policy.digest)
            assert said_of(loop, what) == [WeightsStaged, WeightsCommitted]
            publisher.held(policy.version)
            sizes.append(policy.num_bytes)
    assert sizes[1] < sizes[0] / 8


def lose_a_rank(engine: VllmEngine, loop: EngineLoop, weights: Weights, *, while_it_stages: bool) -> None:
    """The others would wait for it for ever: the engine ends as it did, and is started again."""
    from pipelinerl.engine.vllm.ranks import RankKilled
    from tests import real_engine

    def go_on() -> None:
        for _ in range(20):  # the first may fail before it is known why
            if while_it_stages:
                buffer, digest = publisher.publish(weights, version=loop.version + 1)
                said_of(loop, StageWeights(version=loop.version + 1, buffer=buffer, digest=digest))
                publisher.release(buffer)
            else:
                ask(loop, "lost")
                finish(loop)

    executor: Any = engine._llm.model_executor
    with contextlib.closing(real_engine.Publisher(engine)) as publisher:
        os.kill(executor.workers[1].proc.pid, signal.SIGKILL)
        with pytest.raises(RankKilled) as ended:
            go_on()
    assert ended.value.code == -signal.SIGKILL


def swapped(options: dict[str, Any], *, first: Path, forced: Weights, last: Weights, folder: Path) -> tuple[Completion, tuple[Tensor, ...]]:
    """Swap policies under sequences that run in two ranks, refuse one, and take the last as changes: what that one samples, and the layout
    that the engine asks for.
    """
    from pipelinerl.config import WeightsSection
    from tests import real_engine

    section = WeightsSection(delta=True)  # pyright: ignore[reportCallIssue]
    with (
        real_engine.vllm_engine(
            first,
            options=options,
            weights=section,
            policies=folder / "weights",
            async_scheduling=None if "pipeline_parallel_size" in options else True,
        ) as engine,
        StagingThread(engine) as stager,
    ):
        loop = EngineLoop(engine, engine_id=0, stager=stager)
        with contextlib.closing(real_engine.Publisher(engine)) as publisher:
            judge(swap_under_way(engine, loop, publisher, forced))
        refuse(engine, loop, last)
        for transport in ("shared_memory", "gloo"):
            take_changes(engine, loop, last, folder=folder, transport=transport)
        ask(loop, "last")
        found = finish(loop)["last"]
        lose_a_rank(engine, loop, last, while_it_stages="pipeline_parallel_size" in options)
    return found, engine.limits.tensors


"""
"""


def whole(folder: Path, *, layout: tuple[Tensor, ...] | None = None) -> Completion:
    """What one rank samples, which asks for the same layout: engines of both take the same policies."""
    from tests import real_engine

    with real_engine.vllm_engine(folder) as engine, StagingThread(engine) as stager:
        assert layout in (None, engine.limits.tensors)
        loop = EngineLoop(engine, engine_id=0, stager=stager)
        ask(loop, "last")
        return finish(loop)["last"]


def dense(folder: Path, seed: int) -> Weights:
    from tests import tiny_models

    return tiny_models.make_qwen2(folder, seed=seed)


def mixture(folder: Path, seed: int) -> Weights:
    """The first layer is dense, the second has experts."""
    from safetensors.torch import load_file

    from tests.trainer.tiny import make_folder

    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "head_dim": 32,
        "mlp_only_layers": [0],
    }
    make_folder(folder, family="qwen3_moe", seed=seed, **sizes)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(mixture, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, id="tensor and expert parallel"),
        pytest.param(dense, {"pipeline_parallel_size": 2}, id="pipeline parallel"),
    ],
)
def test_two_ranks_take_every_policy_between_the_same_two_passes_and_each_its_part(
    tmp_path: Path, make: Callable[[Path, int], Weights], options: dict[str, Any]
):
    from safetensors.torch import save_file

    from tests import tiny_models

    forced, last = make(tmp_path / "first", 0), make(tmp_path / "last", 2)
    save_file(tiny_models.forcing(forced, forced_token(0)), tmp_path / "first" / "model.safetensors", metadata={"format": "pt"})
    found, layout = swapped(options, first=tmp_path / "first", forced=forced, last=last, folder=tmp_path)
    save_file(last, tmp_path / "last" / "model.safetensors", metadata={"format": "pt"})
    assert_same(found, whole(tmp_path / "last", layout=layout), name="after the swaps")


def test_two_ranks_serve_versions_of_an_adapter_side_by_side(tmp_path: Path):
    from safetensors.torch import save_file

    from pipelinerl.weights.adapters import AdapterShape
    from tests import real_engine, tiny_models

    weights = tiny_models.make_adaptable(tmp_path, seed=3)
    shape = AdapterShape(rank=RANK, alpha=ALPHA, targets=TARGETS, num_versions=SIDE_BY_SIDE)
    with (
        real_engine.vllm_engine(tmp_path, adapters=shape, options={"tensor_parallel_size": 2}, async_scheduling=True) as engine,
        StagingThread(engine) as stager,
    ):
        loop = EngineLoop(engine, engine_id=0, stager=stager)
        layout = engine.limits.tensors
        shapes = {tensor.name: tensor.shape for tensor in layout}
        with contextlib.closing(real_engine.Publisher(engine)) as publisher:
            forced = {version: tiny_models.forcing_adapter(weights, shapes, 3 + version) for version in range(1, NUM_POLICIES + 1)}
            judge_stamps(under_every_version(loop, publisher, forced))
            judge_rollback(loop, publisher, forced[NUM_POLICIES], version=NUM_POLICIES - 1)
            last = adapter(layout, NUM_POLICIES)
            take(loop, publisher, last, version=NUM_POLICIES, rollback_epoch=1)
            ask(loop, "last")
            found = finish(loop)["last"]
    save_file(merged(weights, last), tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same(found, whole(tmp_path), name="separate adapters in two ranks")
