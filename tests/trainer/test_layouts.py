"""Every layout trains what one process trains: loss, gradients, norm, weights after two steps, and the weights it exports."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from pipelinerl.layout import Layout
from tests.trainer.ranks import run_jobs
from tests.trainer.tiny import make_batch, make_model, make_sample, make_seal, make_step
from trainer.parallel import Replicas

pytestmark = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="real collectives between processes need two cores to end in time")

NUM_STEPS = 2
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"proximal": "engine", "weight": "none", "auxiliary": {"name": "entropy_bonus", "coef": 0.01}},
    "gspo": {},
}
LAYOUTS = {
    "2 copies": Layout(ranks=2),
    "shard 2": Layout(ranks=2, shard=2),
    "tensor 2": Layout(ranks=2, tensor=2),
    "2 copies of shard 2": Layout(ranks=4, shard=2),
    "2 copies of tensor 2": Layout(ranks=4, tensor=2),
    "shard 4": Layout(ranks=4, shard=4),
    "shard 2, tensor 2": Layout(ranks=4, shard=2, tensor=2),
    "2 copies of shard 2, tensor 2": Layout(ranks=8, shard=2, tensor=2),
}
DENSE = ("llama", "qwen2", "qwen3")


def cases() -> list[tuple[str, str, str]]:
    """(layout, family, method): every family under every layout of few ranks, one family under those of many."""
    found: list[tuple[str, str, str]] = []
    for name, layout in LAYOUTS.items():
        families = DENSE if layout.ranks <= 4 else DENSE[-1:]
        found += [(name, family, "gspo" if number % 2 else "grpo") for number, family in enumerate(families)]
    return found


def train(replicas: Replicas, *, folder: Path, method: str) -> dict[str, Any]:
    """Train two steps of seven rows; what came of it, as this rank knows it."""
    generator = np.random.default_rng(0)
    samples = [make_sample(generator, prompt=int(generator.integers(2, 7)), completion=int(generator.integers(1, 30))) for _ in range(14)]
    rows = [samples[:3], samples[3:4], samples[4:8], samples[8:9], samples[9:12], samples[12:13], samples[13:]]
    model = make_model(folder, replicas=replicas, temperature=0.8)
    step, optimizer = make_step(model, replicas=replicas, method=method, overrides=METHODS[method], max_grad_norm=0.5)
    gradients: dict[str, torch.Tensor] = {}

    def keep_gradients(*_: object) -> None:
        for name, parameter in model.module.named_parameters():
            assert parameter.grad is not None
            gradients[name] = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad.clone()

    optimizer._adamw.register_step_pre_hook(keep_gradients)
    metrics: dict[str, float] = {}
    num_waves = -(-len(rows) // replicas.layout.replicas)
    for number in range(NUM_STEPS):
        for wave in range(num_waves):
            index = wave * replicas.layout.replicas + replicas.number
            step.add(make_batch(rows[index] if index < len(rows) else [], step=number, index=wave))
        metrics = step.finish(make_seal(samples, step=number, num_micro_batches=len(rows)))
    return {"metrics": metrics, "gradients": gradients, "weights": {name: tensor.clone() for name, tensor in model.tensors().items()}}


@pytest.fixture(scope="module")
def results(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """What every rank of every case says; all cases of as many ranks run in the same processes."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for size in sorted({layout.ranks for layout in LAYOUTS.values()}):
        chosen = [case for case in cases() if LAYOUTS[case[0]].ranks == size]
        jobs = [(LAYOUTS[name], functools.partial(train, folder=folders[family], method=method)) for name, family, method in chosen]
        found |= dict(zip(chosen, run_jobs(jobs, tmp_path_factory.mktemp(f"{size}-ranks")), strict=True))
    return found


@functools.cache
def alone(folder: Path, method: str) -> dict[str, Any]:
    return train(Replicas(ranks=1, deadline_s=60), folder=folder, method=method)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", cases(), ids=", ".join)
def test_a_layout_trains_as_one_process(
    results: dict[tuple[str, str, str], list[dict[str, Any]]], folders: dict[str, Path], case: tuple[str, str, str]
) -> None:
    _, family, method = case
    expected = alone(folders[family], method)
    ranks = results[case]
    assert set().union(*(rank["gradients"] for rank in ranks)) == expected["gradients"].keys()
    for rank in ranks:
        metrics = {name: value for name, value in expected["metrics"].items() if name != "num_micro_batches"}
        assert {name: rank["metrics"][name] for name in metrics} == pytest.approx(metrics, rel=2e-4, abs=1e-5)
        for name, gradient in rank["gradients"].items():
            whole = expected["gradients"][name]
            assert float((gradient - whole).norm() / whole.norm()) < 2e-5, f"gradient of {name}"
        assert rank["weights"].keys() == expected["weights"].keys()
        for name, weight in rank["weights"].items():
            assert torch.allclose(weight, expected["weights"][name], atol=2e-5), f"weight {name}"
