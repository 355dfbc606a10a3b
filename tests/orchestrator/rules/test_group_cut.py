"""The tail of a group cut by coins: who is asked, and the exact expectation of the estimate on a toy problem, by enumeration.

The toy: a trace ends with its first 1, the t-th token being one with probability sigmoid(theta_t), or after three tokens. Siblings end in
order of their length. Groups of three are enumerated: all traces, all falls of the coins, each with its probability.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from orchestrator.rules.group_cut import GroupCut, group_cut_of
from pipelinerl.algorithms.advantage.early_stop import rloo_doubly_robust
from pipelinerl.algorithms.advantage.outcome import ScoredGroup
from tests.orchestrator.simulate.worlds import config

ONE = 1 / (1 + np.exp(-np.array([0.3, -0.4, 0.8])))
Trace = tuple[int, ...]
TRACES: tuple[Trace, ...] = ((1,), (0, 1), (0, 0, 1), (0, 0, 0))
REWARD: dict[Trace, float] = dict(zip(TRACES, (0.25, 0.0, 1.0, 0.5), strict=True))
PREDICTED = 0.4
"""Of a rollout that stops: any number."""
KEEP = 0.3
UNREAD = 1e6
Estimate = Callable[[tuple[Trace, ...], np.ndarray], np.ndarray]


def probability(trace: Trace) -> float:
    return float(np.prod([ONE[t] if token else 1 - ONE[t] for t, token in enumerate(trace)]))


def score(trace: Trace) -> np.ndarray:
    """Gradient of the log-probability."""
    return np.array([trace[t] - ONE[t] if t < len(trace) else 0.0 for t in range(3)])


EXACT = sum((probability(trace) * REWARD[trace] * score(trace) for trace in TRACES), np.zeros(3))
MEAN_LENGTH = sum(probability(trace) * len(trace) for trace in TRACES)


def weights_of(group: tuple[Trace, ...], stops: bool, *, cut_after: int = 2) -> np.ndarray:
    """Weights by the rule: siblings end in order of length, equal ones in order of number."""
    cut = GroupCut(cut_after=cut_after, keep_probability=KEEP, group_size=3, seed=0)
    weights = np.ones(3)
    for sibling in sorted(range(3), key=lambda one: (len(group[one]), one)):
        for other in cut.ended(0, sibling):
            weights[other] = 0.0 if stops else 1 / KEEP
    return weights


def falls() -> Iterator[tuple[tuple[Trace, ...], bool, float]]:
    """(traces, whether the third stops, probability)."""
    for group in itertools.product(TRACES, repeat=3):
        chance = float(np.prod([probability(trace) for trace in group]))
        yield group, True, chance * (1 - KEEP)
        yield group, False, chance * KEEP


def expectation(estimate: Estimate) -> np.ndarray:
    return sum((chance * estimate(group, weights_of(group, stops)) for group, stops, chance in falls()), np.zeros(3))


def with_weights(group: tuple[Trace, ...], weights: np.ndarray) -> np.ndarray:
    rewards = np.array([REWARD[trace] if weight else UNREAD for trace, weight in zip(group, weights, strict=True)])
    lengths, predicted = np.array([len(trace) for trace in group]), np.full(3, PREDICTED)
    scored = ScoredGroup(rewards=rewards, lengths=lengths, predictions=predicted, sample_weights=weights)
    trained = weights * rloo_doubly_robust(scored)
    return sum((one * score(trace) for one, trace in zip(trained, group, strict=True)), np.zeros(3)) / 3


def by_arrival(group: tuple[Trace, ...], weights: np.ndarray) -> np.ndarray:
    """Train on the two that end first, and forget the third."""
    first = sorted(group, key=len)[:2]
    rewards = [REWARD[trace] for trace in first]
    return ((rewards[0] - rewards[1]) * score(first[0]) + (rewards[1] - rewards[0]) * score(first[1])) / 2


def test_the_gradient_of_a_cut_group_is_exact_on_average():
    np.testing.assert_allclose(expectation(with_weights), EXACT, atol=1e-12)


def test_a_cut_by_arrival_is_biased():
    assert np.abs(expectation(by_arrival) - EXACT).max() > 0.02


def test_weighted_lengths_are_those_of_all_siblings_and_by_arrival_they_are_shorter():
    weighted = sum(
        chance * float(np.dot(weights_of(group, stops), [len(trace) for trace in group])) / 3 for group, stops, chance in falls()
    )
    first = sum(chance * float(np.mean(sorted(map(len, group))[:2])) for group, _, chance in falls())
    assert weighted == pytest.approx(MEAN_LENGTH)
    assert first < 0.9 * MEAN_LENGTH


def test_all_others_are_asked_at_one_moment_and_once():
    cut = GroupCut(cut_after=2, keep_probability=0.5, group_size=4, seed=0)
    assert cut.ended(7, 3) == ()
    assert cut.ended(8, 0) == (), "of another group"
    assert cut.ended(7, 1) == (0, 2)
    assert cut.ended(7, 0) == ()
    assert cut.ended(7, 2) == ()


def test_coins_are_fair_and_fall_the_same_when_they_are_asked_again():
    cut = GroupCut(cut_after=1, keep_probability=0.3, group_size=2, seed=5)
    decisions = [cut.decide(f"{number}/0", 0) for number in range(4000)]
    going = [decision for decision in decisions if not decision.stops]
    assert abs(len(going) / 4000 - 0.3) < 4 * (0.3 * 0.7 / 4000) ** 0.5
    assert {decision.weight for decision in decisions} == {0.0, 1 / 0.3}
    assert cut.decide("17/0", 0) == decisions[17]
    assert cut.decided("17/0", 0) == decisions[17]
    assert cut.decided("17/0", 0) is None, "it was taken"


def test_what_is_predicted_is_the_mean_reward_so_far():
    cut = GroupCut(cut_after=1, keep_probability=0.3, group_size=2, seed=5)
    assert cut.decide("0/0", 0).predicted == 0.0
    for reward in (1.0, 0.0, 0.5):
        cut.scored(reward)
    assert cut.decide("0/1", 0).predicted == 0.5


def test_it_is_off_until_its_key_is_set():
    assert group_cut_of(config(), num_siblings=2) is None
    settings = config(rollout={"group_size": 4, "max_tokens": 64, "cut_after": 3}, algorithm={"name": "rloo_early_stop"})
    assert group_cut_of(settings, num_siblings=4) is not None
