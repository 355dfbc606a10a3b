"""Two replicas train as one: real processes, real collectives."""

# pyright: reportPossiblyUnboundVariable=false

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing

from pipelinerl.config.file import load_run, write_run
from pipelinerl.errors import ConfigError
from pipelinerl.messages import FromTrainer
from pipelinerl.transport.keys import make_keys
from pipelinerl.transport.zmq import ZmqHub
from tests.keys import PEERS
from tests.trainer.conductor import Conductor, make_config
from tests.trainer.ranks import Ranks
from tests.trainer.tiny import make_batch, make_model, make_sample, make_seal, make_step
from trainer.loop import train
from trainer.parallel.replicas import Replicas

pytestmark = pytest.mark.process

Samples = list[dict[str, np.ndarray]]


def _samples() -> Samples:
    generator = np.random.default_rng(0)
    return [make_sample(generator, prompt=4, completion=int(generator.integers(1, 9))) for _ in range(10)]


METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"proximal": "engine", "weight": "none"},
    "m2po": {"masks": {"name": "m2po", "tau": 0.5}},
    "kl_cov": {"objective": {"fraction": 0.2}},
    "grpo_tis": {"weight": {"cap": 3.0, "batch_normalize": True}},
}
"""One that trains row by row, and three that measure the whole step first."""


def _train(folder: Path, rows: list[Samples], replicas: Replicas, method: str) -> dict[str, object]:
    samples = _samples()
    model = make_model(folder, replicas=replicas)
    step, _ = make_step(model, replicas=replicas, max_grad_norm=0.01, method=method, overrides=METHODS[method])
    for number in range(2):
        for index, row in enumerate(rows):
            step.add(make_batch(row, step=number, index=index))
        step.train_held(make_seal(samples, step=number))
        metrics = step.finish(make_seal(samples, step=number))
    return {"metrics": metrics, "weights": [parameter.detach() for parameter in model.parameters()]}


def _run_rank(rank: int, folder: Path, method: str) -> None:
    replicas = Replicas(ranks=2, deadline_s=60)
    samples = _samples()
    rows = [samples[:3], samples[3:8]] if rank == 0 else [samples[8:], []]
    result = _train(folder, rows, replicas, method)
    result["agreed"] = [replicas.all_agree(True, what="in a test"), replicas.all_agree(rank == 0, what="in a test")]
    torch.save(result, folder / f"rank-{rank}.pt")
    replicas.close()


@pytest.mark.parametrize("method", METHODS)
def test_two_replicas_train_as_one(folders: dict[str, Path], method: str) -> None:
    folder = folders["qwen3"]
    expected = _train(folder, [_samples()], Replicas(ranks=1, deadline_s=60), method)
    Ranks(_run_rank, folder, method, size=2).join()
    for rank in range(2):
        got = torch.load(folder / f"rank-{rank}.pt", weights_only=True)
        assert got["agreed"] == [True, False]
        for ours, theirs in zip(got["weights"], expected["weights"], strict=True):  # pyright: ignore[reportArgumentType]
            # A step moves a weight by up to 1e-3, Adam divides a gradient by its own size, and so shows the rounding of small ones.
            assert torch.allclose(ours, theirs, atol=5e-6)
        metrics = expected["metrics"]
        assert isinstance(metrics, dict)
        assert got["metrics"] == pytest.approx(metrics, rel=1e-4)


def _run_trainer_rank(rank: int, run_folder: Path) -> None:
    torch.set_num_threads(1)  # the threads of a parent that has computed are not there
    train(load_run(run_folder), run_folder)


def go_through_a_run(
    folder: Path, run_folder: Path, *, stop_after: int | None = None, starved: int | None = None, **trainer: Any
) -> Conductor:
    """A whole run of two ranks, which are told `trainer`; what its orchestrator has seen."""
    config = make_config(folder, ranks=2, **trainer)
    write_run(run_folder, config)
    make_keys(run_folder, PEERS)
    ranks = Ranks(_run_trainer_rank, run_folder, size=2)

    async def conduct() -> Conductor:
        hub = ZmqHub(run_folder, "trainer", accepts=FromTrainer)
        try:
            conductor = Conductor(
                hub,
                config.model.path,
                config.trainer.steps,
                num_replicas=config.trainer.layout.replicas,
                stop_after=stop_after,
                starved=starved,
            )
            async with asyncio.timeout(60):
                await conductor.run()
        finally:
            hub.close()
        return conductor

    conductor = asyncio.run(conduct())
    ranks.join()
    return conductor


@pytest.mark.parametrize(
    ("stop_after", "starved", "parallel"),
    [
        (None, None, {}),
        (0, None, {}),
        (0, 1, {}),
        (None, None, {"tensor": 2}),
        (0, None, {"tensor": 2}),
        (None, None, {"shard": 2}),
        (None, None, {"pipeline": 2}),
    ],
    ids=["copies", "copies stopped", "copies stopped apart", "tensor", "tensor stopped", "shard", "pipeline"],
)
def test_two_ranks_go_through_a_run_and_end_together(
    folders: dict[str, Path], tmp_path: Path, stop_after: int | None, starved: int | None, parallel: dict[str, int]
) -> None:
    steps = 2 if stop_after is None else 50
    conductor = go_through_a_run(folders["qwen2"], tmp_path, steps=steps, parallel=parallel, stop_after=stop_after, starved=starved)
    num_done = 2 if stop_after is None else 1
    assert [done.step for done in conductor.done] == list(range(num_done))
    assert [policy.version for policy in conductor.published] == list(range(1, num_done + 1))
    assert all(done.metrics["logprob_gap_max"] < 1e-4 for done in conductor.done)
    saved = make_model(tmp_path / "model").tensors()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in conductor.engine.tensors().items())


def test_another_number_of_processes_than_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.ranks is 2, but this process is one of 1 "):
        Replicas(ranks=2, deadline_s=60)
