"""LoRA adapters as policies on real vLLM: versions side by side, each sampling what a model with that adapter merged in samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pipelinerl.engine.loop import EngineLoop
from pipelinerl.engine.staging import StagingThread
from pipelinerl.messages import Completion, Generate, Sampling, StageWeights, WeightsCommitted, WeightsStaged

if TYPE_CHECKING:
    import torch

    from pipelinerl.messages import Tensor

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

RANK, ALPHA, TARGETS, MAX_TOKENS = 4, 8.0, ("q_proj", "v_proj", "down_proj"), 24
NUM_COMPARED = 12


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
    sampling = Sampling(max_tokens=MAX_TOKENS, temperature=0.0, stop_token_ids=())
    loop.handle(Generate(rollout_id=name, attempt=0, token_ids=np.arange(10, 22, dtype=np.int32), sampling=sampling))


def finish(loop: EngineLoop) -> dict[str, Completion]:
    while loop.has_work:
        loop.advance()
    replies = {message.rollout_id: message for message in loop.outbox if isinstance(message, Completion)}
    loop.outbox.clear()
    return replies


def alone(folder: Path, weights: dict[str, torch.Tensor]) -> list[int]:
    """Greedy tokens of an engine that was started on these weights."""
    from safetensors.torch import save_file

    from tests import real_engine

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with real_engine.vllm_engine(folder) as engine, StagingThread(engine) as stager:
        loop = EngineLoop(engine, engine_id=0, stager=stager)
        ask(loop, "alone")
        return finish(loop)["alone"].token_ids.tolist()


def test_versions_of_an_adapter_are_served_side_by_side_and_the_oldest_gives_way(tmp_path: Path):
    from pipelinerl.engine.vllm_adapters import AdapterShape
    from tests import real_engine, tiny_models

    weights = tiny_models.make_qwen2(tmp_path, seed=3)
    shape = AdapterShape(rank=RANK, alpha=ALPHA, targets=TARGETS, num_places=2)
    with real_engine.vllm_engine(tmp_path, adapters=shape) as engine, StagingThread(engine) as stager:
        layout = engine.limits.tensors
        assert len(layout) == 2 * 2 * len(TARGETS)
        publisher = real_engine.Publisher(engine)
        loop = EngineLoop(engine, engine_id=0, stager=stager)

        def take(version: int) -> None:
            slot, digest = publisher.publish(adapter(layout, version), version=version)
            loop.handle(StageWeights(version=version, slot=slot, digest=digest))
            while loop.is_swapping:
                loop._acknowledge_if_staged()
                loop._commit_if_acknowledged()
            assert [type(message) for message in loop.outbox] == [WeightsStaged, WeightsCommitted]
            loop.outbox.clear()
            publisher.release(slot)

        ask(loop, "base")
        for _ in range(3):
            loop.advance()
        for version in (1, 2):
            take(version)
            ask(loop, f"v{version}")
            for _ in range(3):
                loop.advance()
        replies = finish(loop)
        for version in (3, 4, 5):  # with a sequence under each, the third takes the place of the first
            take(version)
            ask(loop, f"v{version}")
            for _ in range(3):
                loop.advance()
        later = finish(loop)
        publisher.close()
    assert {name: set(reply.versions.tolist()) for name, reply in replies.items()} == {"base": {0}, "v1": {1}, "v2": {2}}
    assert later["v3"].versions.tolist() == [3] * 6 + [5] * (MAX_TOKENS - 6), "its place was wanted for version 5"
    assert set(later["v4"].versions.tolist()) == {4}
    expected = {"base": weights} | {f"v{version}": merged(weights, adapter(layout, version)) for version in (1, 2, 4)}
    found = {name: alone(tmp_path, one) for name, one in expected.items()}
    # Later tokens may part where two are equally likely but for rounding: beside other sequences sums are made in another order.
    assert {name: (replies | later)[name].token_ids[:NUM_COMPARED].tolist() for name in expected} == {
        name: tokens[:NUM_COMPARED] for name, tokens in found.items()
    }
    assert len({tuple(tokens[:NUM_COMPARED]) for tokens in found.values()}) == len(found), "the adapters make a difference"
