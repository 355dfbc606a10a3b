"""Samples that cannot move the policy are known before any forward pass: under most methods those whose advantages are all zero.

A group whose rewards are all equal has only such samples, and late in a run most groups are like that. Their part of the gradient is
exactly zero, so a trainer that computes no backward pass for them takes the same step. They still count in every denominator, and their
forward pass still measures how far trainer and engine agree.
"""

from __future__ import annotations

from pipelinerl.algorithms.method import Method
from pipelinerl.algorithms.rules import COLUMNS, makes_advantages_in_trainer

MIN_FRACTION = 1 / 8
"""Part of a row's tokens that must be without a gradient for the row to be split: a second forward pass has costs of its own, and a
backward pass takes twice as long as a forward one. Smaller would split rows for next to nothing, larger computes more that is zero."""

SCALES_WITH_ADVANTAGE = frozenset(name for name, spec in COLUMNS["objective"].items() if spec.reads_advantages and not spec.has_own_term)
"""Objectives that are a product with the token's advantage, so that a sequence without any has no gradient. A user's own is never
among them: nobody knows what it does."""


def gradient_needs_advantage(method: Method) -> bool:
    """True where a sample whose advantages are all zero has a gradient of exactly zero: nothing but the objective makes one."""
    return (
        method.objective.name in SCALES_WITH_ADVANTAGE
        and method.kl.name == "none"
        and method.critic.name == "none"
        and not method.auxiliary
        and not makes_advantages_in_trainer(method)
    )
