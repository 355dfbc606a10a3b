"""The variance-optimal baseline per token position (verl `optimal_token_baseline`).

The squared norm of the score at position j is, for a softmax, 1 - 2 pi_j + sum_v pi_v^2; its running sum W is the energy of the gradient up
to t, and the baseline that minimises variance weighs each sibling's return by it. Needs the sum of squared probabilities of the forward
pass, so it runs in the trainer. Where an importance weight w multiplies the gradient of a token, its energy carries w^2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipelinerl.algorithms.credit.advantage import Float64


def energies(probabilities: Float64, *, square_sums: Float64, importance: Float64 | None = None) -> Float64:
    """[T] sum_{j<=t} w_j^2 (1 - 2 pi_j + sum_v pi_v^2). `importance` [T] are the weights w, truncated as the loss truncates them."""
    energy = 1.0 - 2.0 * probabilities + square_sums
    return np.cumsum(energy if importance is None else importance**2 * energy)


def optimal_token_baseline(returns: Sequence[Float64], *, weights: Sequence[Float64]) -> list[Float64]:
    """N arrays [T]: G - B_t with B_t = sum_i G_it W_it / sum_i W_it over the siblings that have a token at t.

    Where no energy is left (all siblings certain of their token) there is no gradient either, and the advantage is 0. A position that one
    sibling alone reaches is its own baseline: 0.
    """
    longest = max((len(row) for row in returns), default=0)
    total = np.zeros(longest)
    weighted = np.zeros(longest)
    for row, weight in zip(returns, weights, strict=True):
        total[: len(row)] += weight
        weighted[: len(row)] += weight * row
    baseline = np.divide(weighted, total, out=np.zeros(longest), where=total > 0)
    return [np.where(total[: len(row)] > 0, row - baseline[: len(row)], 0.0) for row in returns]
