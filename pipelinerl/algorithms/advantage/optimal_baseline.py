"""The variance-optimal baseline per token position (verl `optimal_token_baseline`).

The squared norm of the score at position j is, for a softmax, 1 - 2 pi_j + sum_v pi_v^2; its running sum W is the energy of the gradient up
to t, and the baseline that minimises variance weighs each sibling's return by it. Needs the sum of squared probabilities of the forward
pass, so it runs in the trainer. Where an importance weight w multiplies the gradient of a token, its energy carries w^2.
"""

from __future__ import annotations

import numpy as np

from pipelinerl.algorithms.advantage.outcome import Float64, ScoredGroup
from pipelinerl.algorithms.declare import advantage
from pipelinerl.algorithms.method import Need


def energy(probabilities: Float64, *, square_sums: Float64, importance: Float64) -> Float64:
    """[T] w_j^2 (1 - 2 pi_j + sum_v pi_v^2). `importance` [T] are the weights w, truncated as the loss truncates them."""
    return importance**2 * (1.0 - 2.0 * probabilities + square_sums)


@advantage(
    source="verl optimal_token_baseline with handle_zero_tail=False; its default True is handle_zero_tail here",
    needs={Need.SQUARE_SUM, Need.OLD_LOGPROBS, Need.WHOLE_STEP},
    min_group=2,
)
def otb(group: ScoredGroup, *, handle_zero_tail: bool = False) -> list[Float64]:
    """R - sum_i R W / sum_i W per position, W_t = sum_{j<=t} w_j^2 (1 - 2 pi_j + sum_v pi_v^2), w the row's weight

    The sums are over the siblings that have a token at t. Where no energy is left (all siblings certain of their token) there is no
    gradient either, and the advantage is 0. A position that one sibling alone reaches is its own baseline: 0; with `handle_zero_tail` it
    has no baseline, and the advantage is R (verl's default).
    """
    weights = [np.cumsum(row) for row in group.required("energies")]
    total, weighted = np.zeros((2, max((len(row) for row in weights), default=0)))
    for weight, reward in zip(weights, group.rewards, strict=True):
        total[: len(weight)] += weight
        weighted[: len(weight)] += weight * reward
    baseline = np.divide(weighted, total, out=np.zeros_like(total), where=total > 0)
    ends = [len(weight) for weight in weights]
    credits = [np.where(total[:end] > 0, reward - baseline[:end], 0.0) for end, reward in zip(ends, group.rewards, strict=True)]
    if handle_zero_tail and len(ends) > 1:
        *_, second, longest = np.argsort(ends)
        credits[longest][ends[second] :] = group.rewards[longest]
    return credits
