"""Early stop by roulette: the rule, and the exact expectation of the gradient estimate on a toy problem, by enumeration.

The toy: three binary tokens, the t-th a 1 with probability sigmoid(theta_t); eight traces with rewards of their own. A trace that begins
with 1 is flagged after its first token. Groups are enumerated: every pair of traces, every fall of both coins, with its probability.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.rules.early_stop import MIN_CONTINUED, Audit, EarlyStop
from pipelinerl.algorithms.advantage.early_stop import doubly_robust, rloo_doubly_robust
from pipelinerl.algorithms.advantage.outcome import ScoredGroup
from pipelinerl.messages import EarlyStopDecision

THETA = np.array([0.3, -0.4, 0.8])
ONE = 1 / (1 + np.exp(-THETA))
TRACES = list(itertools.product((0, 1), repeat=3))
REWARD: dict[tuple[int, ...], float] = dict(zip(TRACES, (0.0, 1.0, 1.0, 0.5, 0.0, 0.25, 0.0, 1.0), strict=True))
NUM_TOKENS = 3
UNREAD = 1e6
"""Reward of a stopped rollout: a number that would show, were it read."""
PREDICTED = {0: 0.6, 1: 0.2}
"""Of a trace, by its first token: what a process reward model says of the prefix, not what is true."""

Trace = tuple[int, ...]
Estimator = Callable[[list[Trace], np.ndarray], np.ndarray]


def probability(trace: Trace, num: int = NUM_TOKENS) -> float:
    return float(np.prod([ONE[t] if trace[t] else 1 - ONE[t] for t in range(num)]))


def score(trace: Trace, num: int = NUM_TOKENS) -> np.ndarray:
    """Gradient of the log-probability of the first `num` tokens."""
    return np.array([trace[t] - ONE[t] if t < num else 0.0 for t in range(NUM_TOKENS)])


EXACT = sum((probability(trace) * REWARD[trace] * score(trace) for trace in TRACES), np.zeros(NUM_TOKENS))


def rollouts(epsilon: float) -> Iterator[tuple[Trace, float, float]]:
    """(trace, weight, probability) of one rollout."""
    for trace in TRACES:
        if trace[0] == 0 or epsilon == 1.0:
            yield trace, 1.0, probability(trace)
        else:
            yield trace, 1.0 / epsilon, probability(trace) * epsilon
            yield trace, 0.0, probability(trace) * (1 - epsilon)


def expectation(estimate: Estimator, *, epsilon: float, group_size: int = 2) -> np.ndarray:
    total = np.zeros(NUM_TOKENS)
    for members in itertools.product(list(rollouts(epsilon)), repeat=group_size):
        chance = float(np.prod([member[2] for member in members]))
        total += chance * estimate([member[0] for member in members], np.array([member[1] for member in members]))
    return total


def weighted_advantages(rewards: np.ndarray, *, weights: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """What trains: the rule's advantage times the weight that the loss multiplies."""
    lengths = np.full(len(rewards), NUM_TOKENS)
    return weights * rloo_doubly_robust(ScoredGroup(rewards=rewards, lengths=lengths, predictions=predicted, sample_weights=weights))


def leave_one_out(traces: list[Trace], weights: np.ndarray) -> np.ndarray:
    rewards = np.array([REWARD[trace] if weight else UNREAD for trace, weight in zip(traces, weights, strict=True)])
    predicted = np.array([PREDICTED[trace[0]] for trace in traces])
    advantages = weighted_advantages(rewards, weights=weights, predicted=predicted)
    return sum((a * score(trace) for a, trace in zip(advantages, traces, strict=True)), np.zeros(NUM_TOKENS)) / len(traces)


def self_including(traces: list[Trace], weights: np.ndarray) -> np.ndarray:
    """A group mean with itself inside; made to be right without stopping, where it is only (N - 1) / N too small."""
    rewards = np.array([REWARD[trace] for trace in traces])
    advantages = weights * (rewards - (weights * rewards).mean()) * len(traces) / (len(traces) - 1)
    return sum((a * score(trace) for a, trace in zip(advantages, traces, strict=True)), np.zeros(NUM_TOKENS)) / len(traces)


def hard_stop(traces: list[Trace], weights: np.ndarray) -> np.ndarray:
    """Flagged rollouts end with reward 0 after the token that flagged them, and what was sampled trains."""
    rewards = np.array([0.0 if trace[0] else REWARD[trace] for trace in traces])
    advantages = (rewards - rewards.mean()) * len(traces) / (len(traces) - 1)
    gradients = [score(trace, 1 if trace[0] else NUM_TOKENS) for trace in traces]
    return sum((a * g for a, g in zip(advantages, gradients, strict=True)), np.zeros(NUM_TOKENS)) / len(traces)


@pytest.mark.parametrize("epsilon", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("group_size", [2, 3])
def test_leave_one_out_with_weights_is_unbiased_at_every_epsilon(epsilon: float, group_size: int) -> None:
    assert expectation(leave_one_out, epsilon=epsilon, group_size=group_size) == pytest.approx(EXACT, abs=1e-12)


@pytest.mark.parametrize("epsilon", [0.5, 0.1])
def test_mean_that_includes_the_rollout_itself_is_biased_as_soon_as_anything_is_stopped(epsilon: float) -> None:
    assert expectation(self_including, epsilon=1.0) == pytest.approx(EXACT, abs=1e-12)
    assert np.abs(expectation(self_including, epsilon=epsilon) - EXACT).max() > 0.05


def test_plain_stopping_with_reward_zero_is_biased() -> None:
    assert np.abs(expectation(hard_stop, epsilon=1.0) - EXACT).max() > 0.05


@pytest.mark.parametrize("epsilon", [1.0, 0.5, 0.1])
def test_weights_have_mean_one_over_rollouts_started(epsilon: float) -> None:
    assert sum(weight * chance for _, weight, chance in rollouts(epsilon)) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(("epsilon", "saved"), [(1.0, 0.0), (0.5, 0.191481), (0.1, 0.344666)])
def test_tokens_saved_are_those_after_the_flag_of_the_rollouts_that_stop(epsilon: float, saved: float) -> None:
    """By hand: P(flag) = sigmoid(0.3) = 0.574443; a stopped trace has 1 of 3 tokens, so the part saved is P(flag) (1 - epsilon) 2/3."""
    tokens = sum(chance * (NUM_TOKENS if weight else 1) for _, weight, chance in rollouts(epsilon))
    assert 1.0 - tokens / NUM_TOKENS == pytest.approx(saved, abs=1e-6)


def test_what_was_predicted_changes_the_variance_and_not_the_mean() -> None:
    for guess in (0.0, 0.7):
        values = [
            (chance, doubly_robust(np.array([REWARD[trace]]), weights=np.array([weight]), predicted=np.array([guess]))[0])
            for trace, weight, chance in rollouts(0.1)
        ]
        assert sum(chance * value for chance, value in values) == pytest.approx(sum(probability(t) * REWARD[t] for t in TRACES), abs=1e-12)


def test_advantages_by_hand() -> None:
    """A survivor of weight 2 with reward 1 where 0.5 was predicted is worth 1.5 to others; a stopped one its prediction, 0.2."""
    advantages = weighted_advantages(np.array([1.0, UNREAD, 0.0]), weights=np.array([2.0, 0.0, 1.0]), predicted=np.array([0.5, 0.2, 0.9]))
    assert advantages == pytest.approx([2.0 * (1.0 - (0.2 + 0.0) / 2), 0.0, 0.0 - (1.5 + 0.2) / 2])
    assert weighted_advantages(np.array([1.0]), weights=np.array([1.0]), predicted=np.array([0.0])).tolist() == [0.0]


# --- the rule -----------------------------------------------------------------------------------------------------------------


def rule(*, epsilon: float = 0.25, min_steps: int = 2, seed: int = 0) -> EarlyStop:
    return EarlyStop(threshold=0.3, keep_probability=epsilon, min_steps=min_steps, seed=seed)


def test_rollout_that_is_never_under_the_threshold_is_not_flagged() -> None:
    assert rule().decide("r", 0, [0.9, 0.3, 0.31]) is None
    assert rule().decide("r", 0, []) is None


def test_scores_before_the_fewest_steps_do_not_flag() -> None:
    assert rule(min_steps=3).decide("r", 0, [0.0, 0.0, 0.5]) is None
    flag = rule(min_steps=3).decide("r", 0, [0.0, 0.0, 0.1, 0.05])
    assert flag is not None
    assert (flag.step, flag.predicted, flag.probability) == (2, 0.1, 0.25)


@given(st.lists(st.floats(0, 1), max_size=8), st.lists(st.floats(0, 1), max_size=8))
def test_decision_at_a_flag_never_depends_on_what_follows(prefix: list[float], future: list[float]) -> None:
    before = rule().decide("r", 0, prefix)
    if before is not None:
        assert rule().decide("r", 0, prefix + future) == before


def test_coin_falls_as_often_as_epsilon_says_alike_when_asked_again_and_anew_for_every_attempt_and_seed() -> None:
    def flags(count: int, *, attempt: int = 0, seed: int = 0) -> list[EarlyStopDecision]:
        found = [rule(seed=seed).decide(f"{index}/0", attempt, [0.9, 0.1]) for index in range(count)]
        return [flag for flag in found if flag is not None]

    decisions = flags(20_000)
    assert len(decisions) == 20_000
    assert decisions == flags(20_000)
    assert np.mean([not flag.stops for flag in decisions]) == pytest.approx(0.25, abs=0.01)
    assert {flag.weight for flag in decisions} == {0.0, 4.0}
    assert np.mean([flag.weight for flag in decisions]) == pytest.approx(1.0, abs=0.05)
    assert {flag.probability for flag in decisions} == {0.25}
    for other in (flags(100, attempt=1), flags(100, seed=1)):
        assert other != decisions[:100]


@pytest.mark.parametrize("epsilon", [0.0, -0.1, 1.1])
def test_epsilon_that_cannot_be_unbiased_is_refused(epsilon: float) -> None:
    with pytest.raises(ValueError, match="expected above 0"):
        rule(epsilon=epsilon)


def test_epsilon_of_one_never_stops() -> None:
    flags = [rule(epsilon=1.0).decide(f"{index}", 0, [0.0, 0.0]) for index in range(1000)]
    assert all(flag is not None and not flag.stops and flag.weight == 1.0 for flag in flags)


def test_audit_ends_the_stopping_when_too_many_flagged_survivors_are_right() -> None:
    audit = Audit(max_false_stop_fraction=0.1, correct_reward=0.5)
    assert audit.right_fraction is None
    for _ in range(MIN_CONTINUED - 1):
        audit.saw(reward=0.5)
    assert audit.allows_stopping, "too few to speak"
    audit.saw(reward=0.5)
    assert not audit.allows_stopping
    calm = Audit(max_false_stop_fraction=0.1, correct_reward=0.5)
    for index in range(100):
        calm.saw(reward=0.49 if index % 10 else 1.0)
    assert (calm.right_fraction, calm.allows_stopping) == (0.1, True)
