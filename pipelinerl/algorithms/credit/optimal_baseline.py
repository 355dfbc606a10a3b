"""The variance-optimal baseline per token position (verl `optimal_token_baseline`).

The squared norm of the score at position j is, for a softmax, 1 - 2 pi_j + sum_v pi_v^2; its running sum W is the energy of the gradient up
to t, and the baseline that minimises variance weighs each sibling's return by it. Needs the sum of squared probabilities of the forward
pass, so it runs in the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipelinerl.algorithms.credit.advantage import Float64


def energies(probabilities: Float64, *, square_sums: Float64, rho_mean: float | None = None) -> Float64:
    """[T] sum_{j<=t} (1 - 2 pi_j + sum_v pi_v^2), times rho_mean^2 where an importance weight multiplies the gradient."""
    running = np.cumsum(1.0 - 2.0 * probabilities + square_sums)
    return running if rho_mean is None else running * rho_mean**2


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
