"""Several teachers: each sample has that of its prompt's row, whatever rows and ranks it is packed into."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipelinerl.config.layout import Layout
from pipelinerl.messages import MicroBatch
from tests.trainer.ranks import run_jobs
from tests.trainer.test_distillation import TEMPERATURE, _by_definition, _config, _samples
from tests.trainer.tiny import make_batch, make_folder, make_model, make_seal, make_step, packed_logprobs
from trainer.build import build_policy, build_step
from trainer.data.split import split_by_gradient
from trainer.model.reference import Reference
from trainer.model.teachers import Teachers
from trainer.parallel.replicas import Replicas

Samples = list[dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of two families and widths, with the same words."""
    sizes = (("llama", 64), ("qwen2", 32))
    return tuple(make_folder(tmp_path_factory.mktemp(family), family=family, seed=7, hidden_size=size) for family, size in sizes)  # pyright: ignore[reportReturnType]


def samples_of_both() -> Samples:
    return [sample | {"teacher": np.array(number % 2)} for number, sample in enumerate(_samples())]


def batch_of(samples: Samples, **options: Any) -> MicroBatch:
    teachers = np.array([sample["teacher"] for sample in samples], np.int32)
    plain = make_batch(samples, **options)
    return msgspec.structs.replace(plain, teacher_ids=teachers)


def make_teachers(two: tuple[Path, Path], replicas: Replicas, *, gives_states: bool = False) -> Teachers:
    models = [make_model(path, temperature=TEMPERATURE, replicas=replicas, is_frozen=True) for path in two]
    return Teachers([Reference(model, replicas=replicas, gives_states=gives_states) for model in models], replicas=replicas)


def train(replicas: Replicas, *, folder: Path, two: tuple[Path, Path], method: str, rows: list[Samples] | None = None) -> dict[str, Any]:
    samples = samples_of_both()
    rows = rows or [samples[:3], samples[3:4], samples[4:]]
    model = make_model(folder, temperature=TEMPERATURE, replicas=replicas, divergence_mix=0.5 if method == "gkd" else None)
    overrides = {} if method == "gkd" else {"auxiliary": []}
    teachers = make_teachers(two, replicas, gives_states=method == "gkd")
    step, optimizer = make_step(model, replicas=replicas, method=method, overrides=overrides, reference=teachers)
    for round_index in range(-(-len(rows) // replicas.layout.replicas)):
        index = round_index * replicas.layout.replicas + replicas.number
        step.add(batch_of(rows[index] if index < len(rows) else [], index=round_index))
    step.train_held(make_seal(samples))  # of a pipeline, what was put off
    gradient = optimizer.gradient.clone()
    numbers = step.finish(make_seal(samples))
    chosen = ("loss", "grad_norm", "reference_kl_k1")
    weights = {name: one.clone() for name, one in model.tensors().items()}
    return {"numbers": {name: numbers[name] for name in chosen}, "weights": weights, "gradient": gradient}


SPLITS = ([9], [1, 8], [3, 0, 6], [1] * 9)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_each_sample_is_distilled_from_its_own_teacher(folders: dict[str, Path], two: tuple[Path, Path], split: list[int]) -> None:
    """Against the definition, over each teacher's samples alone."""
    samples = samples_of_both()
    parts = [_by_definition(folders["qwen3"], two[number], samples[number::2], mix=0.5) for number in (0, 1)]
    rows = [[samples[number] for number in chosen] for chosen in np.split(np.arange(9), np.cumsum(split)[:-1])]
    got = train(Replicas(ranks=1, deadline_s=60), folder=folders["qwen3"], two=two, method="gkd", rows=rows)
    names = make_model(folders["qwen3"]).named_parameters()
    expected = torch.cat([(parts[0][1][name] + parts[1][1][name]).flatten() for name in names])
    assert float((got["gradient"] - expected).norm() / expected.norm()) < 1e-5
    assert got["numbers"]["loss"] == pytest.approx((parts[0][0] + parts[1][0]) / make_seal(samples).num_tokens, rel=1e-5)


def test_sampled_tokens_are_judged_by_their_own_teacher(folders: dict[str, Path], two: tuple[Path, Path]) -> None:
    samples = samples_of_both()
    policy = make_model(folders["qwen3"], temperature=TEMPERATURE)
    teacher_ids = [make_model(path, temperature=TEMPERATURE, is_frozen=True) for path in two]
    gaps = [packed_logprobs(policy, [sample]) - packed_logprobs(teacher_ids[int(sample["teacher"])], [sample]) for sample in samples]
    got = train(Replicas(ranks=1, deadline_s=60), folder=folders["qwen3"], two=two, method="opd")
    assert got["numbers"]["reference_kl_k1"] == pytest.approx(float(torch.cat(gaps).detach().mean()), rel=1e-4)


def test_a_teacher_without_a_sample_in_a_row_computes_nothing(folders: dict[str, Path], two: tuple[Path, Path]) -> None:
    replicas = Replicas(ranks=1, deadline_s=60)
    teachers = make_teachers(two, replicas)
    teachers._references[0].judge = None  # pyright: ignore[reportAttributeAccessIssue]
    model = make_model(folders["qwen3"], temperature=TEMPERATURE)
    step, _ = make_step(model, method="opd", overrides={"auxiliary": []}, reference=teachers)
    step.add(batch_of(samples_of_both()[1::2]))


def test_a_row_that_is_split_keeps_its_teachers() -> None:
    samples = samples_of_both()
    for sample in samples[:3]:
        sample["advantages"][:] = 0
    moving, still = split_by_gradient(batch_of(samples))
    assert moving.teacher_ids is not None
    assert still.teacher_ids is not None
    assert moving.teacher_ids.tolist() == [1, 0, 1, 0, 1, 0]
    assert still.teacher_ids.tolist() == [0, 1, 0]


LAYOUTS = {
    "2 copies": Layout(ranks=2),
    "shard 2": Layout(ranks=2, shard=2),
    "tensor 2": Layout(ranks=2, tensor=2),
    "context 2": Layout(ranks=2, context=2),
}


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="real collectives between processes need two cores to end in time")
def test_every_layout_trains_what_one_rank_trains(folders: dict[str, Path], two: tuple[Path, Path], tmp_path: Path) -> None:
    """In the layout of shards, one replica has rows of one teacher while the other has rows of both."""
    job = functools.partial(train, folder=folders["qwen3"], two=two, method="gkd")
    by_token = functools.partial(train, folder=folders["qwen3"], two=two, method="opd")
    cases = [(layout, job) for layout in LAYOUTS.values()] + [(Layout(ranks=2, pipeline=2), by_token)]
    expected = {id(one): one(Replicas(ranks=1, deadline_s=60)) for one in (job, by_token)}
    for (layout, one), ranks in zip(cases, run_jobs(cases, tmp_path), strict=True):
        for rank in ranks:
            assert rank["numbers"] == pytest.approx(expected[id(one)]["numbers"], rel=1e-3), layout
            for name, wanted in expected[id(one)]["weights"].items():
                assert torch.allclose(rank["weights"][name], wanted, atol=1e-4), (layout, name)


def test_a_run_loads_every_teacher_that_its_config_names(folders: dict[str, Path], two: tuple[Path, Path]) -> None:
    reference = {"path": None, "teachers": {"math": str(two[0]), "code": str(two[1])}}
    config = _config(folders["qwen3"], two[0], reference=reference)
    replicas = Replicas(ranks=1, deadline_s=60)
    step = build_step(config, policy=build_policy(config, replicas=replicas), critic=None, replicas=replicas, first_step=0)
    step.agreement.max_logprob_gap = step.agreement.max_mismatch_kl = float("inf")
    samples = samples_of_both()
    step.add(batch_of(samples))
    totals = [_by_definition(folders["qwen3"], two[number], samples[number::2], mix=0.5)[0] for number in (0, 1)]
    assert step.finish(make_seal(samples))["divergence"] == pytest.approx(sum(totals) / make_seal(samples).num_tokens, rel=1e-4)
