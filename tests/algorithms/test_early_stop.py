"""An unbiased early stop, enumerated: two siblings of a two-step toy task, every trace and every coin.

Step one chooses prefix 0 or 1, step two outcome 0 or 1; the reward is a table. Prefix 0 is flagged: with probability eps it goes on and
carries weight 1/eps, else it stops with weight 0.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from pipelinerl.algorithms.advantage import group_advantages
from pipelinerl.algorithms.advantage.outcome import Float64, ScoredGroup
from tests.algorithms.rows import method_of

REWARD = {(0, 0): 0.0, (0, 1): 1.0, (1, 0): 0.4, (1, 1): 2.0}
CHANCE = {"prefix": 0.3, 0: 0.2, 1: 0.6}
"""Probability of 1 at the first step, and at the second after each prefix."""
PREDICTED = 0.15


def probability(prefix: int, outcome: int) -> float:
    first, second = CHANCE["prefix"], CHANCE[prefix]
    return (first if prefix else 1 - first) * (second if outcome else 1 - second)


def score(prefix: int, outcome: int) -> Float64:
    """d log p / d logits of (first step, second after 0, second after 1)."""
    gradient = np.zeros(3)
    gradient[0] = prefix - CHANCE["prefix"]
    gradient[1 + prefix] = outcome - CHANCE[prefix]
    return gradient


def traces(eps: float) -> list[tuple[int, int, float, float]]:
    """(prefix, outcome, weight, probability of trace and coin)."""
    found = []
    for prefix, outcome in itertools.product((0, 1), repeat=2):
        p = probability(prefix, outcome)
        found += (
            [(prefix, outcome, 1 / eps, p * eps), (prefix, outcome, 0.0, p * (1 - eps))] if prefix == 0 else [(prefix, outcome, 1.0, p)]
        )
    return found


def exact_gradient() -> Float64:
    return sum((probability(*key) * REWARD[key] * score(*key) for key in REWARD), start=np.zeros(3))


def estimated_gradient(eps: float, *, baseline: str) -> Float64:
    method = method_of("rloo_early_stop")
    total = np.zeros(3)
    for pair in itertools.product(traces(eps), repeat=2):
        chance = math.prod(p for *_, p in pair)
        weights = np.array([w for _, _, w, _ in pair])
        rewards = np.array([REWARD[(a, b)] if w else -1e3 for a, b, w, _ in pair])
        scored = ScoredGroup(rewards=rewards, lengths=np.ones(2, int), predictions=np.full(2, PREDICTED), sample_weights=weights)
        advantages = group_advantages(scored, method=method)
        if baseline == "self_including":
            robust = PREDICTED + weights * (np.where(weights > 0, rewards, PREDICTED) - PREDICTED)
            advantages = (rewards - robust.mean()) * 2
        total += chance * sum(w * a * score(*key) for (*key, w, _), a in zip(pair, advantages, strict=True)) / 2
    return total


@pytest.mark.parametrize("eps", [1.0, 0.5, 0.1])
def test_leave_one_out_with_weights_has_the_exact_gradient_in_expectation(eps: float) -> None:
    np.testing.assert_allclose(estimated_gradient(eps, baseline="leave_one_out"), exact_gradient(), atol=1e-12)


def test_a_baseline_that_includes_the_row_itself_is_biased_under_the_stop() -> None:
    assert np.abs(estimated_gradient(0.1, baseline="self_including") - exact_gradient()).max() > 0.05


def test_leave_one_out_under_a_stop_by_hand() -> None:
    """Worth to the others: 1; 0.5 + 4 * (0 - 0.5) = -1.5 for the flagged survivor; 0.4, what was predicted, for the one stopped."""
    scored = ScoredGroup(
        rewards=np.array([1.0, 0.0, 9.0]),
        lengths=np.array([1, 1, 1]),
        predictions=np.array([0.2, 0.5, 0.4]),
        sample_weights=np.array([1.0, 4.0, 0.0]),
    )
    credit = group_advantages(scored, method=method_of("rloo_early_stop"))
    np.testing.assert_allclose(np.asarray(credit), [1.0 + 0.55, 0.0 - 0.7, 0.4 + 0.25])


def test_the_reward_of_a_stopped_row_is_never_read() -> None:
    def advantages(unread: float) -> Float64:
        scored = ScoredGroup(
            rewards=np.array([1.0, unread]), lengths=np.ones(2, int), predictions=np.array([0.2, 0.3]), sample_weights=np.array([1.0, 0.0])
        )
        return np.asarray(group_advantages(scored, method=method_of("rloo_early_stop")))

    np.testing.assert_array_equal(advantages(5.0), advantages(-100.0))
    np.testing.assert_allclose(advantages(5.0), [0.7, -0.7])
