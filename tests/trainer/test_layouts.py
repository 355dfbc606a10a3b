"""Every layout trains what one process trains: loss, gradients, norm, weights after its steps, and the weights it exports."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp_collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp_param_group
from torch.distributed.tensor import DTensor

from pipelinerl.config.layout import Layout, Schedule
from pipelinerl.config.trainer_memory import ActivationCheckpointing
from tests.trainer.ranks import run_jobs
from tests.trainer.tiny import FAMILIES, VOCABULARY, make_batch, make_folder, make_model, make_sample, make_seal, make_step
from trainer import backend
from trainer.model import room
from trainer.parallel.replicas import Replicas
from trainer.parallel.sharding import local
from trainer.rows import trie

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="real collectives between processes need two cores to end in time"),
]

NUM_STEPS = {2: 2, 4: 1, 8: 1}
"""By ranks. The second step begins with weights that the first one changed: what a layout of two ranks does then is done by all."""
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"proximal": "engine", "weight": "none", "auxiliary": {"name": "entropy_bonus", "coef": 0.01}},
    "gspo": {},
    "m2po": {"masks": {"name": "m2po", "tau": 0.5}},
    "otb": {},
}
"""The last two measure the whole step before they train a row; of these the second over all words of the vocabulary."""
LAYOUTS = {
    "2 copies": Layout(ranks=2),
    "shard 2": Layout(ranks=2, shard=2),
    "tensor 2": Layout(ranks=2, tensor=2),
    "context 2": Layout(ranks=2, context=2),
    "2 copies of shard 2": Layout(ranks=4, shard=2),
    "2 copies of tensor 2": Layout(ranks=4, tensor=2),
    "context 2, tensor 2": Layout(ranks=4, context=2, tensor=2),
    "shard 2, context 2": Layout(ranks=4, shard=2, context=2),
    "shard 4": Layout(ranks=4, shard=4),
    "shard 2, tensor 2": Layout(ranks=4, shard=2, tensor=2),
    "context 4": Layout(ranks=4, context=4),
    "shard 2, context 2, tensor 2": Layout(ranks=8, shard=2, context=2, tensor=2),
    "2 copies of shard 2, tensor 2": Layout(ranks=8, shard=2, tensor=2),
}
EXPERT_LAYOUTS = {
    "expert 2": Layout(ranks=2, expert=2),
    "tensor 2, expert 2": Layout(ranks=2, tensor=2, expert=2),
    "2 copies of expert 2": Layout(ranks=4, expert=2),
    "shard 2, expert 2": Layout(ranks=2, shard=2, expert=2),
    "2 copies of shard 2, expert 2": Layout(ranks=4, shard=2, expert=2),
    "shard 4, expert 2": Layout(ranks=4, shard=4, expert=2),
    "context 2, expert 2": Layout(ranks=2, context=2, expert=2),
    "shard 2, tensor 2, expert 4": Layout(ranks=4, shard=2, tensor=2, expert=4),
}
PIPELINES = {
    "pipeline 2": Layout(ranks=2, pipeline=2),
    "pipeline 2 interleaved": Layout(ranks=2, pipeline=2, schedule=Schedule.INTERLEAVED),
    "pipeline 2 with zero bubble": Layout(ranks=2, pipeline=2, schedule=Schedule.ZERO_BUBBLE),
    "pipeline 2, 2 copies": Layout(ranks=4, pipeline=2),
    "pipeline 2, shard 2": Layout(ranks=4, pipeline=2, shard=2),
    "pipeline 2, tensor 2": Layout(ranks=4, pipeline=2, tensor=2),
    "pipeline 2, context 2": Layout(ranks=4, pipeline=2, context=2),
    "pipeline 2, expert 2": Layout(ranks=4, pipeline=2, expert=2),
    "pipeline 2 with zero bubble, shard 2, expert 2": Layout(ranks=4, pipeline=2, schedule=Schedule.ZERO_BUBBLE, shard=2, expert=2),
    "pipeline 4": Layout(ranks=4, pipeline=4),
    "pipeline 2, shard 2, tensor 2": Layout(ranks=8, pipeline=2, shard=2, tensor=2),
    "pipeline 2 interleaved, context 2, tensor 2": Layout(ranks=8, pipeline=2, context=2, tensor=2, schedule=Schedule.INTERLEAVED),
    "pipeline 2 with zero bubble, shard 2, context 2, expert 4": Layout(
        ranks=8, pipeline=2, shard=2, context=2, expert=4, schedule=Schedule.ZERO_BUBBLE
    ),
}
LAYOUTS |= EXPERT_LAYOUTS | PIPELINES


Case = tuple[str, str, str]


def cases() -> list[Case]:
    """(layout, family, method): every family on two ranks, the two with norms of queries and keys, of which one has experts, on more."""
    found: list[Case] = [("pipeline 2", "qwen3", "m2po"), ("pipeline 2, shard 2", "qwen3_moe", "m2po")]
    found += [(name, "qwen3", "otb") for name in ("tensor 2", "context 2", "pipeline 2", "pipeline 2, tensor 2")]
    for name, layout in LAYOUTS.items():
        if layout.pipeline > 1:  # embeddings are tied in the one, experts in the other
            families = ("qwen3_moe",) if layout.expert > 1 else ("qwen3", "qwen3_moe") if layout.ranks == 2 else ("qwen3",)
        else:
            families = ("qwen3_moe",) if layout.expert > 1 else FAMILIES if layout.ranks == 2 else FAMILIES[-1:]
        found += [(name, family, "gspo" if number % 2 else "grpo") for number, family in enumerate(families)]
    return found


@pytest.fixture(scope="module")
def folder_of(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """The model of a case: of four layers where a pipeline cuts them, so that there are two stages for each of two ranks."""
    deep = {
        family: make_folder(tmp_path_factory.mktemp(f"deep-{family}"), family=family, num_hidden_layers=4)
        for family in ("qwen3", "qwen3_moe")
    }
    return lambda case: (deep if LAYOUTS[case[0]].pipeline > 1 else folders)[case[1]]


def make_samples() -> list[dict[str, np.ndarray]]:
    """Fourteen of 3 to 36 tokens, the last four siblings, of which two go on alike."""
    generator = np.random.default_rng(0)
    samples = [make_sample(generator, prompt=int(generator.integers(2, 7)), completion=int(generator.integers(1, 30))) for _ in range(10)]
    siblings = [make_sample(generator, prompt=5, completion=completion) for completion in (3, 9, 3, 14)]
    for sibling in siblings:
        sibling["token_ids"][:5] = siblings[0]["token_ids"][:5]
    siblings[2]["token_ids"][5:7] = siblings[1]["token_ids"][5:7]
    return samples + siblings


def train(
    replicas: Replicas,
    *,
    folder: Path,
    method: str,
    dtype: str = "float32",
    max_logits: int = room.LEAST_BYTES // 4,
    num_steps: int = 2,
    **options: Any,
) -> dict[str, Any]:
    """Train some steps of seven rows; what came of it, as this rank knows it. A pipeline takes several passes for them."""
    samples = make_samples()
    rows = [samples[:3], samples[3:4], samples[4:8], samples[8:9], samples[9:10], samples[10:13], samples[13:]]
    model = make_model(folder, replicas=replicas, temperature=0.8, dtype=dtype, gives_square_sums=method == "otb", **options)
    step, optimizer = make_step(model, replicas=replicas, method=method, overrides=METHODS[method], max_grad_norm=0.5)
    gradients: dict[str, torch.Tensor] = {}

    def keep_gradients(*_: object) -> None:
        """Those of the first step: later ones start from weights that Adam, where a gradient is near 0, moves by what rounding says."""
        if not gradients:  # in bfloat16 the optimizer takes them away
            pieces = {name: local(parameter.grad) for name, parameter in model.named_parameters().items() if parameter.grad is not None}
            for name, gradient in model.placed(pieces).items():
                gradients[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()

    optimizer._adamw.register_step_pre_hook(keep_gradients)
    metrics: dict[str, float] = {}
    num_rounds = -(-len(rows) // replicas.layout.replicas)
    for number in range(num_steps):
        few = (mock.patch.object(backend, "ROWS_PER_RANK", 2), mock.patch.object(trie, "LEAST", 2))
        with few[0], few[1], mock.patch.object(room, "LEAST_BYTES", 4 * max_logits):
            for round_index in range(num_rounds):
                index = round_index * replicas.layout.replicas + replicas.number
                step.add(make_batch(rows[index] if index < len(rows) else [], step=number, index=round_index))
            seal = make_seal(samples, step=number, num_micro_batches=len(rows))
            step.train_held(seal)
        metrics = step.finish(seal)
    weights = {name: tensor.clone() for name, tensor in model.tensors().items()}
    pieces = [local(parameter.detach()) for parameter in model.parameters() if isinstance(parameter, DTensor)]
    used, held = sum(piece.nbytes for piece in pieces), sum(piece.untyped_storage().nbytes() for piece in pieces)
    return {"metrics": metrics, "gradients": gradients, "weights": weights, "used_bytes": used, "held_bytes": held}


@pytest.fixture(scope="module")
def result_of(folder_of: Callable[[Case], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], list[dict[str, Any]]]:
    """What every rank of a case says; all cases of as many ranks run in the same processes, when the first of them is asked for."""

    @functools.cache
    def results(size: int) -> dict[Case, list[dict[str, Any]]]:
        chosen = [case for case in cases() if LAYOUTS[case[0]].ranks == size]
        job = functools.partial(train, num_steps=NUM_STEPS[size])
        jobs = [(LAYOUTS[case[0]], functools.partial(job, folder=folder_of(case), method=case[2])) for case in chosen]
        return dict(zip(chosen, run_jobs(jobs, tmp_path_factory.mktemp(f"{size}-ranks")), strict=True))

    return lambda case: results(LAYOUTS[case[0]].ranks)[case]


@functools.cache
def alone(folder: Path, method: str, num_steps: int) -> dict[str, Any]:
    return train(Replicas(ranks=1, deadline_s=60), folder=folder, method=method, num_steps=num_steps)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", cases(), ids=", ".join)
def test_a_layout_trains_as_one_process(
    result_of: Callable[[Case], list[dict[str, Any]]], folder_of: Callable[[Case], Path], case: Case
) -> None:
    expected = alone(folder_of(case), case[2], NUM_STEPS[LAYOUTS[case[0]].ranks])
    ranks = result_of(case)
    assert set().union(*(rank["gradients"] for rank in ranks)) == expected["gradients"].keys()
    for rank in ranks:
        metrics = {name: value for name, value in expected["metrics"].items() if name != "num_micro_batches"}
        assert {name: rank["metrics"][name] for name in metrics} == pytest.approx(metrics, rel=2e-4, abs=1e-5)
        for name, gradient in rank["gradients"].items():
            whole = expected["gradients"][name]
            assert float((gradient - whole).norm() / whole.norm()) < 1e-5, f"gradient of {name}"
        assert rank["weights"].keys() == expected["weights"].keys()
        for name, weight in rank["weights"].items():
            assert torch.allclose(weight, expected["weights"][name], atol=2e-4), f"weight {name}"
        # A piece cut out of a loaded file is a view into all of it unless it is copied: then nothing is saved by cutting.
        assert rank["held_bytes"] <= 1.2 * rank["used_bytes"]


def test_bfloat16_trains_alike_and_is_exported_in_bfloat16(folders: dict[str, Path], tmp_path: Path) -> None:
    """An update moves a weight by up to 1e-3; where rounding to 8 bits turns the sign of a small gradient, apart. A second one would begin
    with tokens at the edge of the clip, and rounding says on which side they fall.
    """
    job = functools.partial(train, folder=folders["qwen3"], method="grpo", dtype="bfloat16", num_steps=1)
    expected = job(Replicas(ranks=1, deadline_s=60))
    layouts = [Layout(ranks=2, shard=2), Layout(ranks=2, tensor=2), Layout(ranks=2, context=2), Layout(ranks=2, pipeline=2)]
    for ranks in run_jobs([(layout, job) for layout in layouts], tmp_path):
        for rank in ranks:
            assert rank["metrics"]["grad_norm"] == pytest.approx(expected["metrics"]["grad_norm"], rel=0.01)
            assert rank["weights"].keys() == expected["weights"].keys()
            for name, weight in rank["weights"].items():
                assert weight.dtype == torch.bfloat16
                apart = (weight.float() - expected["weights"][name].float()).abs()
                assert float(apart.max()) < 6e-3, name
                assert float(apart.mean()) < 6e-4, name


def test_matrices_are_cut_as_files_have_them_and_held_in_float32(folders: dict[str, Path], tmp_path: Path) -> None:
    """Files in bfloat16, trained in float32: what is cut by tensor and by expert ranks first, and made float32 then, is the same."""
    folder = shutil.copytree(folders["qwen3_moe"], tmp_path / "halves")
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    job = functools.partial(train, folder=folder, method="grpo", num_steps=1)
    expected = job(Replicas(ranks=1, deadline_s=60))
    for ranks in run_jobs([(LAYOUTS[name], job) for name in ("shard 2, tensor 2", "shard 2, tensor 2, expert 4")], tmp_path):
        for rank in ranks:
            for name, gradient in rank["gradients"].items():
                whole = expected["gradients"][name]
                assert gradient.dtype == torch.float32
                assert float((gradient - whole).norm() / whole.norm()) < 1e-5, f"gradient of {name}"
            for name, weight in rank["weights"].items():
                assert torch.allclose(weight, expected["weights"][name], atol=2e-4), f"weight {name}"
            assert rank["held_bytes"] <= 1.2 * rank["used_bytes"]


def test_gradients_held_for_a_step_are_those_reduced_row_by_row_and_cost_one_reduction(folders: dict[str, Path], tmp_path: Path) -> None:
    """Seven rows on two ranks: four reductions of each layer in a step become one; experts and recomputed layers too."""
    job = functools.partial(train, folder=folders["qwen3_moe"], method="grpo", activation_checkpointing=ActivationCheckpointing.FULL)
    expected = job(Replicas(ranks=1, deadline_s=60))
    layouts = [Layout(ranks=2, shard=2), Layout(ranks=2, shard=2, expert=2)]
    jobs = [
        (layout, functools.partial(counting_reductions, functools.partial(job, holds_gradients=is_held)))
        for layout in layouts
        for is_held in (True, False)
    ]
    held, by_row, held_experts, _ = run_jobs(jobs, tmp_path)
    for rank in (*held, *by_row, *held_experts):
        assert rank["metrics"]["grad_norm"] == pytest.approx(expected["metrics"]["grad_norm"], rel=1e-4)
        for name, gradient in rank["gradients"].items():
            whole = expected["gradients"][name]
            assert float((gradient - whole).norm() / whole.norm()) < 1e-5, f"gradient of {name}"
    assert 4 * held[0]["num_reductions"] == by_row[0]["num_reductions"]


def counting_reductions(job: Callable[[Replicas], dict[str, Any]], replicas: Replicas) -> dict[str, Any]:
    """What a job gives, and how many times sharded gradients were reduced."""
    counted = mock.MagicMock(side_effect=fsdp_collectives.foreach_reduce)
    with mock.patch.object(fsdp_param_group, "foreach_reduce", counted):
        return job(replicas) | {"num_reductions": counted.call_count}


def test_recomputed_layers_weights_on_the_host_and_logits_in_pieces_change_no_gradient(folders: dict[str, Path], tmp_path: Path) -> None:
    """The second pass of a layer meets the same ranks in the same places as the first; sharded weights may come from the host for it."""
    job = functools.partial(train, folder=folders["qwen3_moe"], method="grpo")
    expected = job(Replicas(ranks=1, deadline_s=60))
    pieces = functools.partial(job, max_logits=3 * VOCABULARY)
    whole = functools.partial(job, activation_checkpointing=ActivationCheckpointing.FULL)
    job = functools.partial(job, activation_checkpointing=ActivationCheckpointing.SELECTIVE)
    layouts = [
        Layout(ranks=2, shard=2),
        Layout(ranks=2, tensor=2),
        Layout(ranks=2, context=2),
        Layout(ranks=2, shard=2, expert=2),
        Layout(ranks=2, pipeline=2),
    ]
    jobs = [(layout, job) for layout in layouts]
    jobs += [(layouts[0], functools.partial(whole, is_offloaded=True)), (layouts[1], pieces)]
    for ranks in run_jobs(jobs, tmp_path):
        for rank in ranks:
            assert rank["metrics"]["grad_norm"] == pytest.approx(expected["metrics"]["grad_norm"], rel=1e-4)
            for name, gradient in rank["gradients"].items():
                whole = expected["gradients"][name]
                assert float((gradient - whole).norm() / whole.norm()) < 1e-5, f"gradient of {name}"
