"""An engine whose model is spread over two ranks takes policies as one does that holds it whole: each rank its part, all at once."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipelinerl.engine.loop import EngineLoop
from pipelinerl.engine.staging import StagingThread
from pipelinerl.messages import Completion, StageWeights, WeightsCommitted, WeightsRefused, WeightsStaged
from tests.e2e.test_adapters import ask, assert_same, finish
from tests.e2e.test_canary import forced_token, judge, swap_under_way

if TYPE_CHECKING:
    import torch

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


def order(publisher: object, weights: dict[str, torch.Tensor], *, version: int, digest: str | None = None) -> StageWeights:
    slot, found = publisher.publish(weights, version=version)  # pyright: ignore
    return StageWeights(version=version, slot=slot, digest=digest or found)


def said_of(loop: EngineLoop, what: StageWeights) -> list[type]:
    loop.handle(what)
    while loop.is_swapping:
        loop.advance()
    said = [message for message in loop.outbox if not isinstance(message, Completion)]
    loop.outbox.clear()
    print(said)
    return [type(message) for message in said]


def spread(folder: Path, tensors: dict[str, torch.Tensor], last: dict[str, torch.Tensor]) -> Completion:
    """Swap policies under sequences that run in two ranks, then refuse one and take another: what that one samples."""
    from tests import real_engine

    with real_engine.vllm_engine(folder, num_ranks=2) as engine, StagingThread(engine) as stager:
        loop = EngineLoop(engine, engine_id=0, stager=stager)
        publisher = real_engine.Publisher(engine)
        with contextlib.closing(publisher):
            judge(swap_under_way(engine, loop, publisher, tensors))
            newer = loop.version + 1
            assert said_of(loop, order(publisher, tensors, version=newer, digest="ab")) == [WeightsRefused]
            assert loop.version == newer - 1
            assert said_of(loop, order(publisher, last, version=newer)) == [WeightsStaged, WeightsCommitted]
            ask(loop, "last")
            return finish(loop)["last"]


def whole(folder: Path) -> Completion:
    from tests import real_engine

    with real_engine.vllm_engine(folder) as engine, StagingThread(engine) as stager:
        loop = EngineLoop(engine, engine_id=0, stager=stager)
        ask(loop, "last")
        return finish(loop)["last"]


def test_two_ranks_take_every_policy_between_the_same_two_passes_and_each_its_part(tmp_path: Path):
    from safetensors.torch import save_file

    from tests import tiny_models

    tensors = tiny_models.make_qwen2(tmp_path / "first", seed=0)
    save_file(tiny_models.forcing(tensors, forced_token(0)), tmp_path / "first" / "model.safetensors", metadata={"format": "pt"})
    last = tiny_models.make_qwen2(tmp_path / "last", seed=2)
    found = spread(tmp_path / "first", tensors, last)
    assert_same(found, whole(tmp_path / "last"), name="after the swap")
