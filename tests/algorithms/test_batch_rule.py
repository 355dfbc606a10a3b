"""Rules over a whole step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.algorithms.advantage import group_advantages, step_advantages
from pipelinerl.algorithms.advantage.batch_rule import Moments, gpg_alpha, whiten, whiten_sequences, whiten_tokens
from pipelinerl.algorithms.advantage.outcome import ScoredGroup
from tests.algorithms.rows import method_of


def group(rewards: list[float], lengths: list[int], **columns: object) -> ScoredGroup:
    return ScoredGroup(rewards=np.array(rewards), lengths=np.array(lengths), **columns)  # pyright: ignore[reportArgumentType]


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=40), st.sampled_from([1, 2, 4]))
def test_whitening_by_added_moments_is_the_same_on_one_two_and_four_ranks(values: list[float], ranks: int) -> None:
    whole = np.array(values)
    shards = np.array_split(whole, ranks)
    moments = sum((Moments.of(shard) for shard in shards), start=Moments())
    got = np.concatenate([whiten(shard, moments=moments, eps=1e-8) for shard in shards])
    np.testing.assert_allclose(got, (whole - whole.mean()) / np.sqrt(whole.var(ddof=1) + 1e-8), rtol=1e-6, atol=1e-6)


def test_whitening_tokens_counts_a_sequence_once_per_trained_token() -> None:
    groups = [group([1.0, 0.0], [3, 1]), group([2.0, 0.0], [1, 0])]
    got = whiten_tokens([np.array([1.0, -1.0]), np.array([2.0, 9.0])], groups, eps=0.0)
    tokens = np.array([1.0, 1.0, 1.0, -1.0, 2.0])
    expected = (np.array([1.0, -1.0, 2.0]) - tokens.mean()) / tokens.std(ddof=1)
    np.testing.assert_allclose([got[0][0], got[0][1], got[1][0]], expected)


def test_whitening_tokens_leaves_tool_tokens_out_and_at_zero() -> None:
    groups = [group([1.0], [2], loss_mask=(np.array([True, False, True]),)), group([1.0], [1], loss_mask=(np.array([True]),))]
    got = whiten_tokens([[np.array([1.0, 77.0, 2.0])], [np.array([3.0])]], groups, eps=0.0)
    np.testing.assert_allclose(got[0][0], [-1.0, 0.0, 0.0])
    np.testing.assert_allclose(got[1][0], [1.0])


def test_whitening_sequences_counts_each_once_and_refuses_token_columns() -> None:
    groups = [group([1.0, 0.0], [300, 1])]
    np.testing.assert_allclose(whiten_sequences([np.array([3.0, 1.0])], groups, eps=0.0)[0], [np.sqrt(0.5), -np.sqrt(0.5)])
    with pytest.raises(ValueError, match="use whiten_tokens"):
        whiten_sequences([[np.array([1.0])]], groups, eps=0.0)


def test_whitening_equal_advantages_gives_zero_not_noise() -> None:
    groups = [group([1.0, 1.0], [2, 2])]
    np.testing.assert_array_equal(whiten_tokens([np.array([0.5, 0.5])], groups, eps=1e-8)[0], [0.0, 0.0])


def test_gpg_scales_by_the_share_of_groups_with_signal() -> None:
    groups = [group([1.0, 0.0], [1, 1]), group([1.0, 1.0], [1, 1]), group([0.0, 0.0], [1, 1]), group([0.0, 1.0], [1, 1])]
    method = method_of("gpg")
    credits = [group_advantages(one, method=method) for one in groups]
    got = step_advantages(credits, groups, method=method)
    np.testing.assert_allclose(got[0], [1.0, -1.0])
    np.testing.assert_array_equal(got[1], [0.0, 0.0])


def test_gpg_with_no_signal_anywhere_is_zero_and_divides_by_nothing() -> None:
    groups = [group([1.0, 1.0], [1, 1])]
    np.testing.assert_array_equal(gpg_alpha([np.zeros(2)], groups)[0], [0.0, 0.0])


def test_a_method_without_batch_rule_leaves_advantages_alone() -> None:
    credits = [np.array([1.0, -1.0])]
    assert step_advantages(credits, [group([1.0, 0.0], [1, 1])], method=method_of("grpo"))[0] is credits[0]


def test_std_of_rewards_divides_by_the_spread_of_the_whole_step() -> None:
    """Four rewards of mean 1/2 and squared deviations of 1 in all: std 1/sqrt(3) with ddof 1, whatever each group's own is."""
    method = method_of("grpo_batch_std", batch={"eps": 0.0})
    groups = [ScoredGroup(rewards=np.array(rewards), lengths=np.array([3, 1])) for rewards in ([1.0, 0.0], [1.0, 0.0])]
    credits = [group_advantages(group, method=method) for group in groups]
    for credit in step_advantages(credits, groups, method=method):
        np.testing.assert_allclose(credit, np.array([0.5, -0.5]) * np.sqrt(3))
    equal = [ScoredGroup(rewards=np.array([1.0, 1.0]), lengths=np.array([3, 1]))]
    with_eps = method_of("grpo_batch_std")
    (zeros,) = step_advantages([group_advantages(equal[0], method=with_eps)], equal, method=with_eps)
    np.testing.assert_array_equal(zeros, [0.0, 0.0])
