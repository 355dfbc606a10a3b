"""Advantages in a group of which some rollouts were stopped early by a coin; see `orchestrator.rules.early_stop` for the weights.

A stopped rollout has weight 0: it trains nothing, its prefix included, and its reward is unknown, not 0. To its siblings it is worth what
was predicted of it. A flagged survivor counts 1/epsilon, for itself and for those who were stopped. Divide sums by rollouts started.
"""

from __future__ import annotations

import numpy as np

from pipelinerl.algorithms.advantage.outcome import Float64, ScoredGroup
from pipelinerl.algorithms.declare import advantage
from pipelinerl.algorithms.method import Need


@advantage(source="this project", needs={Need.PREDICTIONS}, min_group=2, allows_stopped=True)
def rloo_doubly_robust(group: ScoredGroup) -> Float64:
    """R - mean of the others' s + w (R - s): leave-one-out under an unbiased early stop

    0 for a group of one. The weight w of the rollout itself is left to the loss, where it enters once; s is what was predicted. A stopped
    rollout's reward is not read; its prediction stands in for it. The baseline leaves the rollout itself out: with a mean that includes it,
    its coin enters twice, and the estimate is biased.
    """
    predicted, weights = group.required("predictions"), group.required("sample_weights")
    own = np.where(weights > 0.0, group.rewards, predicted)
    return _less_the_others(own, doubly_robust(group.rewards, weights=weights, predicted=predicted))


def doubly_robust(rewards: Float64, *, weights: Float64, predicted: Float64) -> Float64:
    """[N] predicted + weight * (reward - predicted): unbiased whatever was predicted, and of less variance the better it was.

    `rewards` of stopped rollouts are not read; they may be NaN. `predicted` must depend on the prefix alone, as a step score does.
    """
    return np.where(weights == 1.0, rewards, predicted + weights * np.where(weights > 0.0, rewards - predicted, 0.0))


def _less_the_others(own: Float64, values: Float64) -> Float64:
    """[N] own - mean of the other values; a common shift is taken off first, so that equal rewards give exactly 0."""
    if len(own) < 2:
        return np.zeros(len(own))
    shifted = values - values[0]
    return own - values[0] - (shifted.sum() - shifted) / (len(own) - 1)
