"""PRIME (arXiv:2502.01456): dense rewards from an implicit process reward model phi, trained online from outcome labels.

Per token q = log phi - log ref. The reward of a token is beta q; the last token has none of it, and carries the outcome instead, once.
The loss of phi itself is `critic.implicit_prm_loss`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipelinerl.algorithms.credit.advantage import Float64
from pipelinerl.algorithms.credit.step_credit import following_sum


def process_rewards(log_ratios: Float64, *, beta: float) -> Float64:
    """[T] beta q, with 0 at the last token. `log_ratios` [T] is log phi - log ref over the trained tokens of one sequence."""
    rewards = beta * log_ratios
    if len(rewards):
        rewards[-1] = 0.0
    return rewards


def scale_of(rewards: Sequence[Float64]) -> float:
    """Largest |reverse cumulative sum| over a batch: process rewards are divided by it. Over processes, take the largest."""
    return max((float(np.abs(following_sum(row)).max()) for row in rewards if len(row)), default=0.0)


def returns(rewards: Sequence[Float64], *, correct: Float64, scale: float, process_coef: float, outcome_coef: float) -> list[Float64]:
    """N arrays [T] of one group: reverse cumulative sums of leave-one-out process rewards and, at the last token, outcome.

    The process baseline of a sequence is the mean over its siblings of their mean token reward, times n/(n-1) as for RLOO. Whitening over
    the batch comes after. A group of one gives zeros.
    """
    n = len(rewards)
    if n < 2:
        return [np.zeros_like(row) for row in rewards]
    scaled = [row / (scale + 1e-6) for row in rewards]
    means = np.array([row.mean() if len(row) else 0.0 for row in scaled])
    outcome = (correct - correct.mean()) * n / (n - 1)
    result = []
    for sibling, row in enumerate(scaled):
        credit = process_coef * (row * n / (n - 1) - means.sum() / (n - 1))
        if len(credit):
            credit[-1] += outcome_coef * outcome[sibling]
        result.append(following_sum(credit))
    return result
