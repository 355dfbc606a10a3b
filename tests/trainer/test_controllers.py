"""Coefficients that follow a measurement, in the trainer: they act in the next step, on all ranks alike, and outlive a restart."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelinerl.algorithms.method import ALWAYS_OFFERED, REFERENCE_OFFERS, TRAINER_OFFERS, Method
from pipelinerl.algorithms.methods import resolve
from pipelinerl.config.layout import Layout
from pipelinerl.messages import MicroBatch, StepClosed
from tests.trainer.ranks import run_jobs
from tests.trainer.tiny import make_batch, make_folder, make_model, make_sample, make_seal, make_step
from trainer.checkpoint.checkpoints import Checkpoints
from trainer.checkpoint.portable import state_of
from trainer.controllers import Controllers
from trainer.parallel.replicas import Replicas

OVERRIDES: dict[str, Any] = {
    "kl": {"name": "k1", "beta": 0.3, "target": 1.0, "horizon": 20},
    "auxiliary": {"name": "entropy_bonus", "coef": 0.02, "target": 4.0, "delta": 0.01, "max_coef": 0.035},
}
"""Random tiny models are nats apart, and have entropies just under log 61 = 4.11."""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("teacher"), family="llama", seed=7)


def method_of(overrides: dict[str, Any] = OVERRIDES) -> Method:
    return resolve("grpo", overrides, group_size=8, offers=ALWAYS_OFFERED | TRAINER_OFFERS | REFERENCE_OFFERS, epochs=2)


def rows_of(number: int) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(number)
    return [make_sample(generator, prompt=4, completion=int(generator.integers(1, 9))) for _ in range(8)]


class Trainer:
    """A policy with controlled coefficients, its checkpoints, and no loop."""

    def __init__(self, folder: Path, teacher: Path, run_folder: Path | None = None, overrides: dict[str, Any] = OVERRIDES) -> None:
        model = make_model(folder)
        self.controllers = Controllers(method_of(overrides))
        self.step, optimizer = make_step(
            model,
            overrides=overrides,
            learning_rate=3e-2,
            reference=make_model(teacher, is_frozen=True),
            controllers=self.controllers,
        )
        self.version = 0
        self.checkpoints = None
        if run_folder is not None:
            state = lambda: state_of(model, optimizer) | self.controllers.state()  # noqa: E731
            self.checkpoints = Checkpoints(run_folder / "checkpoints", state=state, rank=0, num_ranks=1, keep=1)
            restored = self.checkpoints.restore()
            self.version = 0 if restored is None else restored.version

    def train(self, until: int) -> list[dict[str, float]]:
        told = []
        for number in range(self.version, until):
            self.step.add(make_batch(rows_of(number), step=number))
            told.append(self.step.finish(make_seal(rows_of(number), step=number)))
        self.version = until
        return told

    def save(self) -> None:
        assert self.checkpoints is not None
        self.checkpoints.begin(self.version, commit="c", num_samples=0, samples="0")
        self.checkpoints.wait()


def test_a_step_is_trained_with_the_coefficients_that_the_step_before_led_to(folders: dict[str, Path], teacher: Path) -> None:
    """By hand from each step's own measurements; the first has the method's, and no bonus, because no entropy was measured."""
    trainer = Trainer(folders["qwen3"], teacher)
    beta, coef, last = 0.3, 0.02, float("inf")
    told = trainer.train(6)
    for numbers in told:
        assert numbers["kl_coef"] == beta
        assert numbers["entropy_coef"] == (coef if last <= 4.0 else 0.0)
        assert numbers["loss_entropy_bonus"] == pytest.approx(-numbers["entropy_coef"] * numbers["entropy"], rel=1e-5)
        assert numbers["loss_kl"] == pytest.approx(beta * numbers["reference_kl_k1"], rel=1e-4)
        last = numbers["entropy"]
        beta *= 1 + min(max(numbers["kl_penalty"] / 1.0 - 1, -0.2), 0.2) * 8 / 20
        coef = min(coef + 0.01, 0.035) if last <= 4.0 else max(coef - 0.01, 0.0)
    assert len({numbers["kl_coef"] for numbers in told}) == 6
    assert len({numbers["entropy_coef"] for numbers in told}) > 2


def test_coefficients_after_a_restart_are_those_without_it_bit_by_bit(folders: dict[str, Path], teacher: Path, tmp_path: Path) -> None:
    straight = Trainer(folders["qwen3"], teacher, tmp_path / "straight").train(5)
    killed = Trainer(folders["qwen3"], teacher, tmp_path / "killed")
    killed.train(2)
    killed.save()
    killed.train(4)
    resumed = Trainer(folders["qwen3"], teacher, tmp_path / "killed")
    assert resumed.version == 2
    assert resumed.train(5) == straight[2:]


def test_a_resumed_run_may_have_another_coefficient_follow_a_target(folders: dict[str, Path], teacher: Path, tmp_path: Path) -> None:
    """The KL's goes on where it was; the entropy's, of which the checkpoint knows nothing, begins as the method says."""
    first = Trainer(folders["qwen3"], teacher, tmp_path, overrides={"kl": OVERRIDES["kl"]})
    first.train(2)
    first.save()
    reached = first.controllers.in_force()["kl_coef"]
    resumed = Trainer(folders["qwen3"], teacher, tmp_path)
    assert resumed.version == 2
    assert resumed.controllers.in_force() == {"kl_coef": reached, "entropy_coef": 0.0}
    assert reached != 0.3
    (numbers,) = resumed.train(3)
    assert numbers["entropy_coef"] == 0.0
    fixed = Trainer(folders["qwen3"], teacher, tmp_path, overrides={"kl": {"name": "k1", "beta": 0.3}})
    assert fixed.version == 2, "and back"


def test_a_checkpoint_of_fixed_coefficients_holds_none(folders: dict[str, Path]) -> None:
    """So that checkpoints of before there were any can be read."""
    assert Controllers(method_of({"kl": {"name": "k3", "beta": 0.1}})).state() == {}


def test_a_step_without_a_token_and_a_policy_that_rests_move_nothing(folders: dict[str, Path], teacher: Path) -> None:
    trainer = Trainer(folders["qwen3"], teacher)
    trainer.step.add(make_batch([]))
    trainer.step.finish(StepClosed(step=0, num_micro_batches=1, num_tokens=0, num_samples=0))
    assert trainer.controllers.in_force() == {"kl_coef": 0.3, "entropy_coef": 0.0}
    trainer.step.critic_warmup_steps = 2
    trainer.version = 1
    trainer.train(2)
    assert trainer.controllers.in_force() == {"kl_coef": 0.3, "entropy_coef": 0.0}
    trainer.train(3)
    assert trainer.controllers.in_force()["kl_coef"] != 0.3


LAYOUTS = {"copies": Layout(ranks=2), "tensor": Layout(ranks=2, tensor=2), "context": Layout(ranks=2, context=2)}


def _train(replicas: Replicas, *, folder: Path, teacher: Path) -> dict[str, list[float]]:
    model = make_model(folder, replicas=replicas)
    reference = make_model(teacher, replicas=replicas, is_frozen=True)
    step, _ = make_step(model, replicas=replicas, overrides=OVERRIDES, learning_rate=3e-2, reference=reference)
    found: dict[str, list[float]] = {"kl_coef": [], "entropy_coef": []}
    num_rounds = -(-2 // replicas.layout.replicas)
    for number in range(4):
        samples = rows_of(number)
        rows: list[MicroBatch] = [make_batch(samples[:3], step=number), make_batch(samples[3:], step=number, index=1)]
        for round_index in range(num_rounds):
            step.add(rows[round_index * replicas.layout.replicas + replicas.number])
        numbers = step.finish(make_seal(samples, step=number))
        for name, values in found.items():
            values.append(numbers[name])
    return found


def _disagree(replicas: Replicas) -> float:
    """One last bit apart, on both sides of the entropy's target."""
    controllers = Controllers(method_of())
    numbers = {"kl_penalty": 1.1, "sequences": 8.0, "entropy": 4.0 if replicas.rank == 0 else float(np.nextafter(4.0, 5.0))}
    step_like = functools.partial(replicas.reduce, operation=torch.distributed.ReduceOp.MAX, what="in a test")
    controllers.follow(numbers, agree=step_like)
    return float(controllers.state()["coefficients"]["entropy"])


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="real collectives between processes need two cores to end in time")
def test_two_ranks_follow_what_one_follows_and_have_one_coefficient(folders: dict[str, Path], teacher: Path, tmp_path: Path) -> None:
    job = functools.partial(_train, folder=folders["qwen3"], teacher=teacher)
    expected = job(Replicas(ranks=1, deadline_s=60))
    *found, apart = run_jobs([*((layout, job) for layout in LAYOUTS.values()), (LAYOUTS["tensor"], _disagree)], tmp_path)
    for name, ranks in zip(LAYOUTS, found, strict=True):
        assert ranks[0] == ranks[1], name
        for coefficient, values in expected.items():
            assert ranks[0][coefficient] == pytest.approx(values, rel=1e-4), name
    assert apart[0] == apart[1] == 0.01
    assert len(set(expected["entropy_coef"])) > 2
