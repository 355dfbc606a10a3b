"""Advantages in a group of which some rollouts were stopped early by a coin; see `orchestrator.rules.early_stop` for the weights.

A stopped rollout has weight 0: it trains nothing, its prefix included, and its reward is unknown, not 0. To its siblings it is worth what
was predicted of it. A flagged survivor counts 1/epsilon, for itself and for those who were stopped. Divide sums by rollouts started.
"""

from __future__ import annotations

import numpy as np

from pipelinerl.algorithms.credit.advantage import Float64


def doubly_robust(rewards: Float64, *, weights: Float64, predicted: Float64) -> Float64:
    """[N] predicted + weight * (reward - predicted): unbiased whatever was predicted, and of less variance the better it was.

    `rewards` of stopped rollouts are not read; they may be NaN. `predicted` must depend on the prefix alone, as a step score does.
    """
    return predicted + weights * np.where(weights > 0.0, rewards - predicted, 0.0)


def roulette_advantage(rewards: Float64, *, weights: Float64, predicted: Float64) -> Float64:
    """[N] weight * (reward - mean of the siblings' doubly robust values), 0.0 for stopped rollouts and for a group of one.

    The baseline leaves the rollout itself out. With a mean that includes it, its coin enters twice, and the estimate is biased.
    """
    num = len(rewards)
    if num < 2:
        return np.zeros(num)
    values = doubly_robust(rewards, weights=weights, predicted=predicted)
    baselines = (values.sum() - values) / (num - 1)
    return weights * np.where(weights > 0.0, rewards - baselines, 0.0)
