"""Coefficients that follow a measurement: the KL's is held by a target KL, the entropy bonus's by a target entropy.

Pure functions of numbers that are the same on every rank, called once after each step; the trainer keeps the state and puts it into its
checkpoints (`trainer.controllers`). A rule is controlled where its option `target` is above 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.algorithms.method import Method, Rule

MAX_ERROR = 0.2
"""Largest proportional error that is acted on (arXiv:1909.08593): a larger one lets one odd step change a coefficient for long."""


def controlled_kl(method: Method) -> Rule | None:
    """The penalty whose `beta` follows the measured KL; None where it stays as it is."""
    return method.kl if method.kl.options.get("target") else None


def controlled_entropy(method: Method) -> Rule | None:
    """The bonus whose `coef` follows the measured entropy; None where it stays as it is."""
    return next((rule for rule in method.auxiliary if rule.name == "entropy_bonus" and rule.options.get("target")), None)


def next_kl_coefficient(coefficient: float, *, measured: float, target: float, horizon: float, num_sequences: float) -> float:
    """beta (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon), after n sequences (arXiv:1909.08593; verl AdaptiveKLController)."""
    error = min(max(measured / target - 1, -MAX_ERROR), MAX_ERROR)
    return coefficient * (1 + error * num_sequences / horizon)


def next_entropy_coefficient(
    coefficient: float, *, measured: float, target: float, delta: float, min_coef: float, max_coef: float
) -> float:
    """One `delta` up where the entropy is at most the target, else one down, within bounds (Skywork-OR1 arXiv:2505.22312; TRL)."""
    return min(coefficient + delta, max_coef) if measured <= target else max(coefficient - delta, min_coef)


def control_lines(method: Method) -> Iterator[str]:
    """Describe the controlled coefficients, for the log of a run."""
    if rule := controlled_kl(method):
        yield (
            f"control      beta of {rule.name} starts at {rule.options['beta']:g}; after each step of n sequences it is multiplied by"
            f" 1 + clip(KL / {rule.options['target']:g} - 1, -{MAX_ERROR}, {MAX_ERROR}) n / {rule.options['horizon']:g}"
        )
    if rule := controlled_entropy(method):
        bounds = f"within {rule.options['min_coef']:g} and {rule.options['max_coef']:g}"
        yield (
            f"control      coef of {rule.name} starts at {rule.options['coef']:g}, goes up by {rule.options['delta']:g} after a step whose"
            f" entropy is at most {rule.options['target']:g} nats and else down, {bounds}; it acts after such a step only"
        )
