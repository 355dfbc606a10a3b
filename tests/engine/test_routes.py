"""A mixture of experts on real vLLM: which experts it chose, and what the trainer computes with that known."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from orchestrator.rollouts.micro_batch import micro_batch_of
from orchestrator.rollouts.trajectories import end_to_end
from pipelinerl.data.expert_routes import table_of, unknown
from pipelinerl.engine.loop import EngineLoop
from pipelinerl.engine.staging import StagingThread
from pipelinerl.messages import Completion, Generate, MicroBatch, Prompt, Sample, Sampling, StageWeights
from tests.real_engine import Publisher, vllm_engine

if TYPE_CHECKING:
    import torch

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

NUM_TOKENS = 24
NUM_ROLLOUTS = 12
LAYERS, EXPERTS, TOP_K = 2, 16, 4


def _requests(version: int) -> dict[str, Generate]:
    chance = np.random.default_rng(3 + version)
    shared = chance.integers(3, 60, 40, dtype=np.int32)
    asked: dict[str, Generate] = {}
    for number in range(NUM_ROLLOUTS):
        prompt = shared if number < 4 else chance.integers(3, 60, chance.integers(2, 20), dtype=np.int32)
        sampling = Sampling(max_tokens=NUM_TOKENS, stop_token_ids=(), seed=number)
        asked[f"{number}"] = Generate(rollout_id=f"{number}", attempt=0, token_ids=prompt, sampling=sampling)
    return asked


def _sample(folder: Path, *, next_policy: Path) -> list[MicroBatch]:
    """Rows sampled under the engine's own policy, and under one that it was then given."""
    from safetensors.torch import load_file

    rows: list[MicroBatch] = []
    with vllm_engine(folder, dtype="bfloat16", max_tokens=128, replay_routing=True, async_scheduling=True) as engine:
        loop, publisher = EngineLoop(engine, engine_id=0, stager=StagingThread(engine)), Publisher(engine)
        for version in (0, 1):
            if version:
                buffer, digest = publisher.publish(load_file(next_policy / "model.safetensors"), version=1)
                loop.handle(StageWeights(version=1, buffer=buffer, digest=digest))
                while loop.version == 0:
                    loop.advance()
            asked = _requests(version)
            for request in asked.values():
                loop.handle(request)
            while loop.has_work:
                loop.advance()
            assert engine._routes is not None
            assert not engine._routes._parts, "nothing is kept of finished requests"
            completions = [message for message in loop.outbox if isinstance(message, Completion)]
            loop.outbox.clear()
            assert all(set(completion.versions) == {version} for completion in completions)
            rows.append(_row(asked, completions))
        publisher.close()
    return rows


def _row(asked: dict[str, Generate], completions: list[Completion]) -> MicroBatch:
    samples = []
    for number, completion in enumerate(sorted(completions, key=lambda completion: int(completion.rollout_id))):
        prompt = Prompt(prompt_id=f"0:{number}", text="", token_ids=asked[completion.rollout_id].token_ids)
        times = {"engine_id": 0, "admitted_at": 0.0, "finished_at": 1.0}
        said = {name: getattr(completion, name) for name in ("rollout_id", "attempt", "finish", "routes")}
        trajectory = end_to_end(prompt, completion, group_id=number, sibling=0, **said, **times)
        samples.append(Sample(trajectory=trajectory, reward=0.0, advantages=np.ones(trajectory.num_tokens, np.float32)))
    return micro_batch_of(tuple(samples), step=0, index=0)


def test_replayed_routes_bring_engine_and_trainer_together_also_after_a_swap(tmp_path: Path) -> None:
    from tests.trainer.tiny import make_folder

    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": 64,
        "head_dim": 32,
    }
    folders = [make_folder(tmp_path / f"moe-{seed}", family="qwen3_moe", seed=seed, **sizes) for seed in (0, 1)]
    first, second = _sample(folders[0], next_policy=folders[1])
    _check_table(first)
    for folder, batch in zip(folders, (first, second), strict=True):
        replayed, native = _gaps(folder, batch)
        assert float(replayed.mean()) < 0.85 * float(native.mean())
        assert float(replayed.max()) < 0.6 * float(native.max())
    replayed, _ = _gaps(folders[0], second)
    assert float(replayed.mean()) > 0.2, "the second row was sampled from another policy"


def _check_table(batch: MicroBatch) -> None:
    assert batch.routes is not None
    table = table_of(batch.routes)
    assert (table.dtype, table.shape) == (np.uint8, (len(batch.token_ids), LAYERS, TOP_K))
    lasts = np.cumsum(batch.lengths) - 1
    known = ~unknown(table)
    assert not known[lasts].any()
    assert (table[known] < EXPERTS).all()
    assert all(len(set(chosen)) == TOP_K for chosen in table[known].reshape(-1, TOP_K).tolist())
    assert _num_unknown(batch) in (0, 3 * 32, 3 * 40), "at most what the prefix cache spared of the prompt that four share"


def _num_unknown(batch: MicroBatch) -> int:
    assert batch.routes is not None
    return int(unknown(table_of(batch.routes)).sum()) - NUM_ROLLOUTS


def _gaps(folder: Path, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Between the engine's log-probabilities and the trainer's, by the record of the experts and by its own choice."""
    import torch

    from tests.trainer.tiny import make_model, make_seal, make_step

    gaps: list[torch.Tensor] = []
    theirs = torch.from_numpy(batch.logprobs[batch.loss_mask])
    for row in (batch, msgspec.structs.replace(batch, routes=None)):
        model = make_model(folder, dtype="bfloat16", replay_routing=True)
        step, _ = make_step(model, replay_routing=True)
        laid_out = step.lay_out(row)
        assert laid_out is not None
        with torch.no_grad():
            gaps.append((model.logprobs(laid_out)[0] - theirs).abs())
        step.add(row)
        expected = _num_unknown(row) if row.routes is not None else len(batch.token_ids) - NUM_ROLLOUTS
        assert step.finish(make_seal([{"loss_mask": batch.loss_mask}]))["num_unrouted_tokens"] == expected
    return gaps[0], gaps[1]
