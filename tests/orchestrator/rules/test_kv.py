"""Whose KV cache is computed anew: by its oldest part, and by what its mean lag makes of what the trainer measured; worked by hand."""

import numpy as np
import pytest

from orchestrator.rules.kv import DOUBT, MIN_TOKENS, KvPolicy, squared_lags, squared_lags_of
from tests.orchestrator import handmade


def test_without_a_bound_the_lag_has_no_limit():
    policy = KvPolicy(max_staleness=3)
    policy.measured(kl=100.0, square=1.0, num_tokens=1000)
    assert (policy.max_staleness, policy.max_mean_staleness) == (3, None)


def test_a_cache_may_lag_as_far_as_the_kl_measured_so_far_predicts_the_bound():
    policy = KvPolicy(max_kl=0.02)
    policy.measured(kl=4.0, square=400.0, num_tokens=200)
    assert policy.max_mean_staleness == pytest.approx(np.sqrt(2.0)), "0.01 nats for each squared version, so 0.02 at its root"
    policy.measured(kl=0.4, square=400.0, num_tokens=200)
    assert policy.max_mean_staleness == pytest.approx(np.sqrt(0.02 * (0.9 * 400 + 400) / (0.9 * 4 + 0.4))), "earlier steps weigh less"


def test_a_few_tokens_and_a_kl_of_zero_are_no_evidence():
    policy = KvPolicy(max_kl=0.02)
    policy.measured(kl=50.0, square=1.0, num_tokens=MIN_TOKENS - 1)
    assert policy.max_mean_staleness is None
    policy = KvPolicy(max_kl=0.02)
    policy.measured(kl=0.0, square=400.0, num_tokens=MIN_TOKENS)
    assert policy.max_mean_staleness is None


def test_where_nothing_is_kept_any_more_something_is_kept_again_in_time():
    policy = KvPolicy(max_kl=0.02)
    policy.measured(kl=400.0, square=400.0, num_tokens=200)
    before = policy.max_mean_staleness
    assert before is not None
    assert before < 1.0, "every cache a version old is computed anew"
    for _ in range(250):
        policy.measured(kl=0.0, square=0.0, num_tokens=0)
    assert policy.max_mean_staleness == pytest.approx(before / DOUBT**125)
    assert policy.max_mean_staleness is not None
    assert policy.max_mean_staleness > 1.0


VERSIONS = [3, 3, 4, 5, 5]


@pytest.mark.parametrize(
    ("recomputed", "trained", "lags"),
    [
        ((), 5, [9 / 5, 9 / 6]),  # prompt 2 * 2, tokens 2 + 2 + 1, over 5 tokens and then 6
        ((0,), 5, [9 / 5, 9 / 6]),  # before the first token: nothing was older
        ((2,), 5, [5 / 5, 5 / 6]),  # before the 4: prompt and two tokens are of version 4, as is the third
        ((3,), 5, []),
        ((2, 3), 5, []),  # at both swaps
        ((), 4, [4 / 4]),  # prompt 2 * 1, tokens 1 + 1
        ((3,), 4, [4 / 4]),  # what came later changes nothing
        ((), 3, []),
        ((), 6, []),
    ],
)
def test_the_lag_of_a_token_is_the_mean_over_what_its_cache_held(recomputed: tuple[int, ...], trained: int, lags: list[float]):
    square, num_tokens = squared_lags(np.array(VERSIONS, np.int32), num_prompt=2, recomputed=recomputed, trained=trained)
    assert num_tokens == len(lags)
    assert square == pytest.approx(sum(lag * lag for lag in lags))


def test_a_trained_step_is_measured_by_its_trajectories_and_the_kl_less_what_is_due_to_arithmetic():
    trajectory = handmade.trajectory([0, 0] + [1] * MIN_TOKENS, num_prompt=1)
    metrics = {"mismatch_kl_stale_kv": 0.012, "mismatch_kl_on_policy": 0.002, "tokens_stale_kv": float(MIN_TOKENS)}
    policy, expected = KvPolicy(max_kl=0.02), KvPolicy(max_kl=0.02)
    policy.trained(1, [trajectory], metrics)
    square, num_tokens = squared_lags_of(trajectory, trained=1)
    expected.measured(kl=0.01 * MIN_TOKENS, square=square, num_tokens=num_tokens)
    assert num_tokens == MIN_TOKENS
    assert policy.max_mean_staleness == pytest.approx(expected.max_mean_staleness)
