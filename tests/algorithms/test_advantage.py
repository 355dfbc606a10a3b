"""Advantages of one group, on numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.algorithms.advantage import group_advantages, keeps_group, outcome, shaping, token_columns
from pipelinerl.algorithms.advantage.outcome import ScoredGroup
from pipelinerl.algorithms.advantage.role_baseline import RoleBaselines
from tests.algorithms.rows import method_of


def group(*rewards: float, lengths: list[int] | None = None, **columns: object) -> ScoredGroup:
    return ScoredGroup(
        rewards=np.array(rewards, dtype=np.float64),
        lengths=np.array(lengths or [1] * len(rewards), dtype=np.int64),
        **columns,  # pyright: ignore[reportArgumentType]
    )


ONE_OF_FOUR = group(1, 0, 0, 0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("maxrl", [3.0, -1.0, -1.0, -1.0]),
        ("grpo_passk", [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_one_correct_sibling_of_four_gets_the_published_advantages(name: str, expected: list[float]) -> None:
    np.testing.assert_allclose(group_advantages(ONE_OF_FOUR, method=method_of(name)), expected, atol=2e-5)


def test_grpo_matches_the_documented_ddof_for_four_and_for_two_siblings() -> None:
    biased = method_of("grpo", advantage={"ddof": 0})
    np.testing.assert_allclose(group_advantages(ONE_OF_FOUR, method=biased), [1.7320, -0.5773, -0.5773, -0.5773], atol=1e-4)
    np.testing.assert_allclose(group_advantages(group(1, 0), method=method_of("grpo")), [0.7071, -0.7071], atol=1e-4)
    np.testing.assert_allclose(group_advantages(group(1, 0), method=biased), [1.0, -1.0], atol=1e-4)
    np.testing.assert_allclose(group_advantages(group(1, 0), method=method_of("rloo")), [1.0, -1.0])


def test_opo_weighs_the_baseline_by_length() -> None:
    sized = group(1, 0, 0, 0, lengths=[100, 200, 300, 400])
    np.testing.assert_allclose(group_advantages(sized, method=method_of("opo")), [0.9, -0.1, -0.1, -0.1])


def test_rloo_divided_by_std_equals_leave_one_out_over_the_group_std() -> None:
    method = method_of("rloo", advantage={"divide_by_std": True})
    np.testing.assert_allclose(group_advantages(ONE_OF_FOUR, method=method), np.array([1, -1 / 3, -1 / 3, -1 / 3]) / 0.5, atol=1e-5)


def test_remax_subtracts_the_greedy_reward_and_refuses_a_group_without_one() -> None:
    method = method_of("remax")
    np.testing.assert_allclose(group_advantages(group(1.0, 0.25, greedy_reward=0.5), method=method), [0.5, -0.25])
    with pytest.raises(ValueError, match="greedy_reward"):
        group_advantages(group(1.0, 0.25), method=method)


def test_gdpo_normalises_each_component_before_it_weighs_them() -> None:
    components = np.array([[1.0, 100.0], [0.0, 300.0]])
    scored = group(0.0, 0.0, components=components, component_weights=np.array([1.0, 0.5]))
    half = np.sqrt(0.5)
    np.testing.assert_allclose(group_advantages(scored, method=method_of("gdpo")), [half - 0.5 * half, -half + 0.5 * half], atol=1e-5)


def test_passk_gives_a_tie_at_the_top_nothing() -> None:
    assert not np.any(outcome.passk(group(1, 1, 0)))
    np.testing.assert_allclose(outcome.passk(group(0.2, 0.9, 0.5)), [0, 0.4, 0])


def test_role_baseline_is_the_mean_before_the_group_and_survives_a_snapshot() -> None:
    method = method_of("rae", advantage={"decay": 0.5})
    baselines = RoleBaselines(decay=0.5)
    scored = group(1.0, 3.0, 10.0, roles=("writer", "writer", "critic"))
    np.testing.assert_allclose(group_advantages(scored, method=method, baselines=baselines), [1.0, 3.0, 10.0])
    assert baselines.state() == {"writer": 1.0, "critic": 5.0}
    restored = RoleBaselines(decay=0.5, state=baselines.state())
    np.testing.assert_allclose(group_advantages(scored, method=method, baselines=restored), [0.0, 2.0, 5.0])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "maxrl", "grpo_passk", "gdpo", "rloo_early_stop"])
def test_a_group_of_one_has_no_advantage_rather_than_its_raw_reward(name: str) -> None:
    alone = group(
        0.7,
        components=np.array([[0.7]]),
        predictions=np.array([0.1]),
        sample_weights=np.array([1.0]),
    )
    np.testing.assert_array_equal(group_advantages(alone, method=method_of(name)), [0.0])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl", "grpo_passk"])
def test_equal_rewards_give_exactly_zero_whatever_their_rounding(name: str) -> None:
    np.testing.assert_array_equal(group_advantages(group(0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1), method=method_of(name)), np.zeros(7))


def test_maxrl_with_mean_zero_and_opo_without_tokens_stay_finite() -> None:
    np.testing.assert_array_equal(group_advantages(group(0, 0, 0), method=method_of("maxrl")), np.zeros(3))
    np.testing.assert_array_equal(group_advantages(group(1, 0, lengths=[0, 0]), method=method_of("opo")), np.zeros(2))
    np.testing.assert_allclose(group_advantages(group(1, 0, lengths=[0, 4]), method=method_of("opo")), [1.0, 0.0])


def test_maxrl_refuses_a_reward_below_zero() -> None:
    with pytest.raises(ValueError, match="got a reward of -1"):
        group_advantages(group(1, -1), method=method_of("maxrl"))


def test_an_unscored_sibling_cannot_enter_a_group_as_a_number() -> None:
    with pytest.raises(ValueError, match="must be finite"):
        group(1.0, float("nan"))
    with pytest.raises(ValueError, match="lengths has 1 entries, expected 2"):
        group(1.0, 0.0, lengths=[3])


def test_a_withheld_sibling_still_counts_in_the_baseline() -> None:
    """Its tokens train nothing, but its reward moves its siblings' advantages."""
    scored = group(1.0, 0.0, lengths=[2, 0], loss_mask=(np.array([True, True]), np.array([False, False, False])))
    columns = token_columns(group_advantages(scored, method=method_of("dr_grpo")), group=scored)
    np.testing.assert_allclose(columns[0], [0.5, 0.5])
    np.testing.assert_array_equal(columns[1], [0.0, 0.0, 0.0])


@pytest.mark.parametrize(("length", "penalty"), [(1000, 0.0), (16384, 0.0), (18432, -0.5), (20480, -1.0), (30000, -1.0)])
def test_overlong_penalty_of_dapo(length: int, penalty: float) -> None:
    assert shaping.overlong_penalties(np.array([length]), max_tokens=20480, buffer_tokens=4096, factor=1.0)[0] == pytest.approx(penalty)


def test_shaping_changes_rewards_before_the_advantage() -> None:
    method = method_of("dr_grpo", shaping=[{"name": "overlong_penalty", "max_tokens": 20480, "buffer_tokens": 4096}])
    np.testing.assert_allclose(group_advantages(group(1, 1, lengths=[100, 20480]), method=method), [0.5, -0.5])


def test_kl_in_the_reward_sums_over_trained_tokens_only() -> None:
    method = method_of("dr_grpo", shaping=[{"name": "minus_token_kl", "coef": 0.1}])
    scored = group(
        1.0,
        0.0,
        loss_mask=(np.array([True, False]), np.array([True])),
        token_kl=(np.array([2.0, 1e9]), np.array([0.0])),
    )
    np.testing.assert_allclose(group_advantages(scored, method=method), [0.4, -0.4])


def test_filter_sets_aside_equal_rewards_up_to_rounding_and_counts_whole_groups() -> None:
    dapo = method_of("dapo")
    assert not keeps_group(group(0.3, 0.1 + 0.2, 0.3), method=dapo)
    assert keeps_group(group(0.3, 0.4), method=dapo)
    assert keeps_group(group(1, 1), method=method_of("grpo"))


@pytest.mark.parametrize(
    ("correct", "kept"), [([1, 0, 0, 0, 0], True), ([1, 1, 1, 1, 0], True), ([1, 1, 1, 1, 1], False), ([0] * 5, False)]
)
def test_accuracy_band_keeps_groups_between_a_fifth_and_four_fifths(correct: list[int], kept: bool) -> None:
    scored = group(*map(float, correct), correct=np.array(correct, dtype=bool))
    assert keeps_group(scored, method=method_of("grpo", group_filter="accuracy_band")) is kept


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9), st.floats(-5, 5), st.floats(0.5, 4))
def test_group_advantages_ignore_a_constant_and_grpo_a_scale(rewards: list[float], shift: float, scale: float) -> None:
    base, moved = group(*rewards), group(*[reward + shift for reward in rewards])
    for estimator in (outcome.dr_grpo, lambda g: outcome.rloo(g, divide_by_std=False, eps=1e-6, ddof=1)):
        np.testing.assert_allclose(estimator(moved), estimator(base), atol=1e-9)
        assert abs(float(estimator(base).sum())) < 1e-9
    scaled = group(*[reward * scale for reward in rewards])
    if np.std(rewards) > 0.01:
        np.testing.assert_allclose(outcome.grpo(scaled, eps=1e-9, ddof=1), outcome.grpo(base, eps=1e-9, ddof=1), atol=1e-5)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9))
def test_rloo_is_the_reward_minus_the_mean_of_the_others(rewards: list[float]) -> None:
    expected = [reward - np.mean(rewards[:i] + rewards[i + 1 :]) for i, reward in enumerate(rewards)]
    np.testing.assert_allclose(outcome.rloo(group(*rewards), divide_by_std=False, eps=1e-6, ddof=1), expected, atol=1e-9)
