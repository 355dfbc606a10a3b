"""Advantages per token: GAE, step credit, PRIME, the optimal baseline."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.algorithms.advantage import graph, group_advantages, prime, token_advantage
from pipelinerl.algorithms.advantage.optimal_baseline import energy
from pipelinerl.algorithms.advantage.outcome import Float64, ScoredGroup, StepScores
from tests.algorithms.rows import method_of

REWARDS = np.array([0.0, 0.0, 1.0])
VALUES = np.array([0.2, 0.4, 0.6])
ALL = np.array([True, True, True])


def steps(ends: list[int], scores: list[float], anchors: list[int] | None = None) -> StepScores:
    return StepScores(ends=np.array(ends), scores=np.array(scores), anchors=None if anchors is None else np.array(anchors))


def stepped(rewards: list[float], lengths: list[int], *scores: StepScores, **columns: object) -> ScoredGroup:
    return ScoredGroup(rewards=np.array(rewards), lengths=np.array(lengths), steps=scores, **columns)  # pyright: ignore[reportArgumentType]


def test_gae_by_hand() -> None:
    got = token_advantage.gae(REWARDS, values=VALUES, loss_mask=ALL, gamma=1.0, lam=0.95)
    np.testing.assert_allclose(got, [0.751, 0.58, 0.4], atol=1e-9)


def test_gae_carries_value_and_sum_through_a_tool_token() -> None:
    values = np.array([0.2, 1e6, 0.6])
    got = token_advantage.gae(REWARDS, values=values, loss_mask=np.array([True, False, True]), gamma=1.0, lam=0.95)
    np.testing.assert_allclose(got, [0.78, 0.0, 0.4], atol=1e-9)


def test_gae_with_lambda_one_is_the_return_minus_the_value() -> None:
    rewards, values = np.array([0.3, -0.1, 0.7, 0.2]), np.array([0.5, 0.1, 0.4, 0.9])
    got = token_advantage.gae(rewards, values=values, loss_mask=np.ones(4, dtype=bool), gamma=1.0, lam=1.0)
    np.testing.assert_allclose(got, rewards[::-1].cumsum()[::-1] - values)


def test_vapo_takes_lambda_from_the_length_and_returns_with_lambda_one() -> None:
    loss_mask = np.ones(40, dtype=bool)
    rewards, values = np.zeros(40), np.full(40, 0.25)
    rewards[-1] = 1.0
    advantages, returns = token_advantage.vapo_gae(rewards, values=values, loss_mask=loss_mask, gamma=1.0, alpha=0.05)
    np.testing.assert_allclose(advantages, token_advantage.gae(rewards, values=values, loss_mask=loss_mask, gamma=1.0, lam=0.5))
    np.testing.assert_allclose(returns, np.ones(40))
    short, _ = token_advantage.vapo_gae(rewards[-2:], values=values[-2:], loss_mask=loss_mask[-2:], gamma=1.0, alpha=0.05)
    np.testing.assert_allclose(short, [0.0, 0.75], err_msg="lam is 0 where 1/(alpha L) exceeds 1")


def test_turn_gae_is_constant_inside_a_turn_and_zero_on_tool_tokens() -> None:
    loss_mask = np.array([True, True, False, True, True, True])
    got = token_advantage.turn_gae(REWARDS, values=VALUES, ends=np.array([1, 3, 5]), loss_mask=loss_mask, gamma=1.0, lam=0.95)
    np.testing.assert_allclose(got, [0.751, 0.751, 0.0, 0.58, 0.4, 0.4], atol=1e-9)


def test_reinforce_pp_puts_the_outcome_at_the_last_trained_token_and_kl_on_each() -> None:
    method = method_of("reinforce_pp", advantage={"kl_coef": 0.1, "gamma": 0.5})
    scored = ScoredGroup(
        rewards=np.array([2.0, 1.0]),
        lengths=np.array([2, 0]),
        loss_mask=(np.array([True, False, True, False]), np.array([False])),
        token_kl=(np.array([1.0, 99.0, 3.0, 99.0]), np.array([5.0])),
    )
    first, empty = group_advantages(scored, method=method)
    np.testing.assert_allclose(first, [-0.1 + 0.5 * (2.0 - 0.3), 0.0, 2.0 - 0.3, 0.0])
    np.testing.assert_array_equal(empty, [0.0])


@given(st.lists(st.floats(-1, 1), max_size=12))
def test_difference_credit_telescopes_to_the_last_score(scores: list[float]) -> None:
    assert float(graph.differences(np.array(scores)).sum()) == pytest.approx(scores[-1] if scores else 0.0, abs=1e-9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(1, 5))
def test_min_credit_is_not_raised_by_padding_with_easy_steps(scores: list[float], padding: int) -> None:
    plain = graph.future_minimum(np.array(scores))
    padded = graph.future_minimum(np.array([1.0] * padding + scores + [1.0] * padding))
    np.testing.assert_array_equal(padded[padding : padding + len(scores)], plain)
    assert padded[0] == plain[0] == min(scores)


def test_step_difference_spreads_over_tokens_and_adds_the_centred_outcome() -> None:
    method = method_of("step_difference", advantage={"process_coef": 2.0, "outcome_coef": 1.0})
    scored = stepped([1.0, 0.0], [4, 2], steps([1, 2], [0.5, 0.75]), steps([0], [0.1]))
    first, second = group_advantages(scored, method=method)
    np.testing.assert_allclose(first, [1.5, 1.5, 1.0, 0.5], err_msg="the last token lies after the last step")
    np.testing.assert_allclose(second, [-0.3, -0.5])


def test_step_min_is_centred_over_the_pooled_steps() -> None:
    method = method_of("step_min", advantage={"outcome_coef": 0.0})
    scored = stepped([1.0, 0.0], [3, 1], steps([0, 1, 2], [0.9, 0.2, 0.6]), steps([0], [0.6]))
    first, second = group_advantages(scored, method=method)
    np.testing.assert_allclose(first, np.array([0.2, 0.2, 0.6]) - 0.4)
    np.testing.assert_allclose(second, [0.2])


def test_process_grpo_credits_a_token_with_its_own_and_all_following_steps() -> None:
    scored = stepped([0.0, 0.0], [3, 2], steps([0, 2], [1.0, 0.0]), steps([1], [0.5]))
    first, second = group_advantages(scored, method=method_of("process_grpo"))
    std = np.std([1.0, 0.0, 0.5], ddof=1)
    np.testing.assert_allclose(first, np.array([0.0, -0.5, -0.5]) / std, atol=1e-5)
    np.testing.assert_allclose(second, [0.0, 0.0], atol=1e-5)


def test_process_grpo_pooled_by_position_compares_first_steps_with_first_steps() -> None:
    method = method_of("process_grpo", advantage={"pool": "position"})
    scored = stepped([0.0, 0.0], [2, 1], steps([0, 1], [1.0, 9.0]), steps([0], [0.0]))
    first, second = group_advantages(scored, method=method)
    half = np.sqrt(0.5)
    np.testing.assert_allclose(first, [half, 0.0], atol=1e-5, err_msg="a second step without a counterpart has no baseline")
    np.testing.assert_allclose(second, [-half], atol=1e-5)


def test_step_reinforce_discounts_by_steps_not_by_tokens() -> None:
    (only,) = group_advantages(stepped([0.0], [5], steps([1, 4], [1.0, 4.0])), method=method_of("step_reinforce", advantage={"gamma": 0.5}))
    np.testing.assert_allclose(only, [3.0, 3.0, 4.0, 4.0, 4.0])


def test_gigpo_adds_an_advantage_among_equal_states() -> None:
    method = method_of("gigpo", advantage={"gamma": 0.5, "weight": 2.0, "divide_by_std": False})
    scored = stepped([1.0, 0.0], [2, 1], steps([0, 1], [0.0, 1.0], [7, 8]), steps([0], [0.0], [7]))
    first, second = group_advantages(scored, method=method)
    np.testing.assert_allclose(first, [0.5 + 2 * 0.25, 0.5], err_msg="state 8 was left once: no baseline, no step advantage")
    np.testing.assert_allclose(second, [-0.5 - 2 * 0.25])


def test_step_scores_refuse_ends_that_do_not_rise_and_scores_that_are_not_numbers() -> None:
    with pytest.raises(ValueError, match="must rise"):
        steps([2, 2], [0.1, 0.2])
    with pytest.raises(ValueError, match="must be finite"):
        steps([1], [float("nan")])


def primed(*rewards: Float64, correct: list[bool]) -> ScoredGroup:
    lengths = np.array([len(row) for row in rewards])
    return ScoredGroup(rewards=np.array(correct, np.float64), lengths=lengths, correct=np.array(correct), process_rewards=rewards)


def test_prime_adds_the_outcome_exactly_once_and_no_process_reward_to_the_last_token() -> None:
    """Rewards of 0.1 and -0.2 have returns of -0.1 and -0.2: the largest is 0.2."""
    (rewards,) = prime.process_rewards([np.array([2.0, -4.0, 10.0])], beta=0.05)
    np.testing.assert_allclose(rewards, [0.5, -1.0, 0.0], atol=1e-5)
    got = group_advantages(primed(np.zeros(3), np.zeros(2), correct=[True, False]), method=method_of("prime"))
    np.testing.assert_allclose(got[0], [5.0, 5.0, 5.0], err_msg="5 * RLOO(outcome), seen once from every token")
    np.testing.assert_allclose(got[1], [-5.0, -5.0])


def test_prime_process_part_by_hand() -> None:
    method = method_of("prime", advantage={"process_coef": 1.0, "outcome_coef": 1.0})
    got = group_advantages(primed(np.array([1.0, 0.0]), np.array([-0.5, 0.0]), correct=[False, False]), method=method)
    baseline = 0.5 - 0.25
    np.testing.assert_allclose(got[0], [2.0 - 2 * baseline, -baseline])
    np.testing.assert_allclose(got[1], [-1.0 - 2 * baseline, -baseline])
    np.testing.assert_array_equal(group_advantages(primed(np.array([1.0]), correct=[True]), method=method)[0], [0.0])


def weighed(rewards: Sequence[float] | Float64, *energies: list[float]) -> ScoredGroup:
    rows = tuple(np.array(row) for row in energies)
    return ScoredGroup(rewards=np.array(rewards), lengths=np.array([len(row) for row in rows]), energies=rows)


LOGITS = np.array([0.3, -0.5, 0.9])


@pytest.mark.parametrize("importance", [(1.0, 1.0), (1.7, 0.4)])
def test_energy_equals_the_brute_force_squared_score_on_three_tokens(importance: tuple[float, float]) -> None:
    """Where the logits of each position are parameters of their own, |sum_j w_j d log p(y_j)|^2 is the sum of w_j^2 |score_j|^2."""
    weights = np.array(importance)
    policy = np.exp(LOGITS) / np.exp(LOGITS).sum()
    for first, second in itertools.product(range(3), repeat=2):
        probabilities = policy[[first, second]]
        scores = [weight * (np.eye(3)[token] - policy) for weight, token in zip(weights, (first, second), strict=True)]
        got = energy(probabilities, square_sums=np.full(2, (policy**2).sum()), importance=weights)
        np.testing.assert_allclose(got, [score @ score for score in scores])


def test_optimal_baseline_minimises_the_variance_of_the_gradient() -> None:
    """One position, three tokens: no other constant baseline makes E[(G - b)^2 |score|^2] smaller."""
    policy = np.exp(LOGITS) / np.exp(LOGITS).sum()
    reward = np.array([1.0, 0.2, -0.5])
    norms = 1 - 2 * policy + (policy**2).sum()
    copies = np.repeat(np.arange(3), [500, 300, 200])
    got = group_advantages(weighed(reward[copies], *([norms[i]] for i in copies)), method=method_of("otb"))
    baseline = reward[copies[0]] - got[0][0]

    def second_moment(b: float) -> float:
        return float(((reward[copies] - b) ** 2 * norms[copies]).mean())

    assert second_moment(baseline) <= min(second_moment(baseline + step) for step in (-0.01, 0.01))


def test_optimal_baseline_uses_at_each_position_only_the_siblings_that_reach_it() -> None:
    """Energies add up: at the second token two siblings weigh 1 + 2 and 2 + 4."""
    method = method_of("otb")
    got = group_advantages(weighed([1.0, 0.0, 0.5], [1.0, 2.0, 3.0], [3.0], [0.0]), method=method)
    np.testing.assert_allclose(got[0], [0.75, 0.0, 0.0])
    np.testing.assert_allclose(got[1], [-0.25])
    np.testing.assert_allclose(got[2], [0.25])
    first, second = group_advantages(weighed([1.0, 0.0], [1.0, 2.0], [2.0, 4.0]), method=method)
    np.testing.assert_allclose(first, [1 - 1 / 3, 1 - 3 / 9])
    np.testing.assert_allclose(second, [-1 / 3, -3 / 9])
    np.testing.assert_array_equal(group_advantages(weighed([1.0], [0.0]), method=method)[0], [0.0])
