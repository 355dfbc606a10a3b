"""Coefficients that follow a measurement: by other people's controllers, by hand, and refused or said where they cannot act."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.algorithms.controllers import next_entropy_coefficient, next_kl_coefficient
from pipelinerl.algorithms.listing import describe_run
from pipelinerl.algorithms.methods import resolve
from pipelinerl.algorithms.rules import COLUMNS
from pipelinerl.config.file import parse
from pipelinerl.errors import ConfigError
from tests.algorithms.rows import EVERYTHING, Seq, loss_and_gradient, method_of
from tests.algorithms.test_unused import lines_of

GOLDEN = Path(__file__).with_name("golden")
VERL: dict[str, Any] = json.loads((GOLDEN / "peer_values.json").read_text())["adaptive_kl"]
TRL: dict[str, Any] = json.loads((GOLDEN / "trl_losses.json").read_text())["entropy_control"]
ENTROPY = {"name": "entropy_bonus", "coef": 0.01, "target": 0.5}


def test_the_kl_coefficient_is_that_of_verl_step_after_step() -> None:
    coefficient, options = VERL["start"], {name: VERL[name] for name in ("target", "horizon", "num_sequences")}
    for measured, expected in zip(VERL["measured"], VERL["coefficients"], strict=True):
        coefficient = next_kl_coefficient(coefficient, measured=measured, **options)
        assert coefficient == expected


def test_the_kl_coefficient_by_hand() -> None:
    """Ten per cent over the target, 100 sequences, horizon 1,000: one per cent up. Far off, 0.2 of a horizon's part and no more."""
    options = {"target": 2.0, "horizon": 1000, "num_sequences": 100}
    assert next_kl_coefficient(0.5, measured=2.2, **options) == pytest.approx(0.5 * 1.01)
    assert next_kl_coefficient(0.5, measured=2000.0, **options) == pytest.approx(0.5 * 1.02)
    assert next_kl_coefficient(0.5, measured=-5.0, **options) == pytest.approx(0.5 * 0.98)
    assert next_kl_coefficient(0.5, measured=2.0, **options) == 0.5


def test_the_entropy_coefficient_is_that_of_trl_step_after_step() -> None:
    """TRL applies what stood after the step before, and only after an entropy that was at most the target."""
    names = {"target": "entropy_target", "delta": "entropy_coef_delta", "min_coef": "entropy_coef_min", "max_coef": "entropy_coef_max"}
    options = {ours: TRL["options"][theirs] for ours, theirs in names.items()}
    coefficient, last = TRL["start"], float("inf")
    for measured, in_force, after in zip(TRL["entropies"], TRL["in_force"], TRL["after"], strict=True):
        assert (coefficient if last <= options["target"] else 0.0) == pytest.approx(in_force, abs=1e-12)
        coefficient, last = next_entropy_coefficient(coefficient, measured=measured, **options), measured
        assert coefficient == after


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_kl_that_is_measured_is_the_mean_over_sequences_of_the_mean_over_their_tokens(kind: str) -> None:
    """As verl measures it, by the estimator at hand and before beta: two tokens of one sequence count as much as one of another."""
    method = method_of("grpo", kl={"name": kind, "beta": 0.3})
    row: dict[str, Any] = {"behaviour": [-1.0] * 2, "advantages": [0.0] * 2}
    rows = [
        Seq(logprobs=[-1.0, -1.0], reference=[-1.2, -1.6], **row),
        Seq(logprobs=[-1.0], behaviour=[-1.0], reference=[-2.0], advantages=[0.0]),
    ]
    _, _, sums = loss_and_gradient(rows, method=method)
    estimate = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: 2.718281828459045**-d - 1 + d}[kind]
    expected = ((estimate(0.2) + estimate(0.6)) / 2 + estimate(1.0)) / 2
    assert float(sums.meters["kl_penalty_sum"]) / float(sums.meters["sequences_sum"]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"kl": {"name": "k3", "target": 0.1, "fade_steps": 10}}, "kl k3: fade_steps moves its coefficient on a line, and target"),
        ({"auxiliary": {**ENTROPY, "fade_steps": 10}}, "auxiliary entropy_bonus: fade_steps moves its coefficient on a line, and target"),
        ({"auxiliary": {**ENTROPY, "coef": 2.0}}, "got coef 2.0, expected one from min_coef 0.0 to max_coef 1.0"),
        ({"auxiliary": {**ENTROPY, "min_coef": 0.5, "max_coef": 0.1}}, "got coef 0.01, expected one from min_coef 0.5 to max_coef 0.1"),
        (
            {"kl": {"name": "k3", "target": 0.1, "horizon": 100}},
            "one step of 512 sequences could take all of beta away: got horizon 100, expected more than 102.4",
        ),
    ],
)
def test_what_cannot_be_controlled_is_refused(overrides: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match="cannot run here") as refused:
        resolve("grpo", overrides, group_size=8, offers=EVERYTHING, samples_per_step=512)
    assert problem in str(refused.value)


def test_what_controls_is_accepted() -> None:
    overrides = {"kl": {"name": "k3", "target": 0.1, "horizon": 103}, "auxiliary": {**ENTROPY, "coef": 0.0}}
    assert resolve("grpo", overrides, group_size=8, offers=EVERYTHING, samples_per_step=512).kl.options["target"] == 0.1
    assert lines_of("grpo", overrides) == [], "a bonus that begins at 0 and has a target comes up from there"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"kl": {"name": "k3", "horizon": 500}}, "horizon of k3 unused: target is 0"),
        (
            {"auxiliary": {"name": "entropy_bonus", "coef": 0.1, "delta": 0.1, "max_coef": 2.0}},
            "delta, max_coef of entropy_bonus unused: target is 0",
        ),
        ({"kl": {"name": "k3", "beta": 0.0, "target": 0.1}}, "k3 unused: algorithm.overrides.kl.beta is 0"),
    ],
)
def test_options_without_a_target_are_said_to_be_inert(overrides: dict[str, Any], told: str) -> None:
    (line,) = lines_of("grpo", overrides)
    assert line.startswith(told)


def test_the_log_of_a_run_says_what_follows_what() -> None:
    overrides = {"kl": {"name": "k3", "target": 0.05}, "auxiliary": ENTROPY}
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"source": "d"}, "reward": [{"function": "r:r"}], "reference": {"path": "m"}}
    said = describe_run(parse(tree | {"algorithm": {"overrides": overrides}}, origin="a test"))
    assert (
        "beta of k3 starts at 0.04; after each step of n sequences it is multiplied by 1 + clip(KL / 0.05 - 1, -0.2, 0.2) n / 10000" in said
    )
    assert "coef of entropy_bonus starts at 0.01, goes up by 0.005 after a step whose entropy is at most 0.5 nats" in said
    assert "control" not in describe_run(parse(tree | {"algorithm": {"overrides": {"kl": "k3"}}}, origin="a test"))


def test_every_penalty_can_be_controlled() -> None:
    assert all({"target", "horizon"} <= spec.options.keys() for name, spec in COLUMNS["kl"].items() if name != "none")
