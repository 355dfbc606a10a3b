"""Predicted lengths and the peak of a KV cache, on numbers worked by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from orchestrator.rules.lengths import MIN_GROUPS, Lengths, kv_token_passes, peak_tokens


def lengths(*groups: tuple[int, ...], max_tokens: int = 100) -> Lengths:
    found = Lengths(group_size=2, max_tokens=max_tokens)
    for group_id, group in enumerate(groups):
        for one in group:
            found.finished(group_id, one)
    return found


def test_without_a_finished_rollout_the_longest_is_expected():
    assert lengths().expected(7) == 100


def test_before_variances_are_known_one_sibling_weighs_as_much_as_all_others():
    """Eight groups would tell k; of one, the mean is (2 + 4) / 2 = 3. A probe of 9: (3 * 2 + 9) / 3 = 5 is the mean of all three, and
    half of the way from there to 9 is 7.
    """
    found = lengths((2, 4))
    found.finished(50, 9)
    assert found.k == 1.0
    assert found.expected(50) == pytest.approx(5 + (9 - 5) / 2)
    assert found.expected(51) == pytest.approx(5), "no sibling of it has ended"


def test_the_weight_of_siblings_follows_from_both_variances():
    """Means 3 and 11, four times each: their variance is 16 * 8 / 7 = 128 / 7; within each, 2. Between: 128 / 7 - 2 / 2 = 121 / 7, so
    k = 2 / (121 / 7) = 14 / 121.
    """
    found = lengths(*([(2, 4), (10, 12)] * (MIN_GROUPS // 2)))
    assert found.k == pytest.approx(14 / 121)
    found.finished(50, 9)
    mean = (8 * 7 * 2 + 9) / 17
    assert found.expected(50) == pytest.approx(mean + (9 - mean) / (1 + 14 / 121))


def test_groups_that_differ_by_chance_alone_say_nothing_of_their_siblings():
    """Means are all 6 and each group has a spread: what lies between groups is less than what lies within them."""
    found = lengths(*([(2, 10), (4, 8)] * (MIN_GROUPS // 2)))
    found.finished(50, 90)
    assert found.k == float("inf")
    assert found.expected(50) == pytest.approx((8 * 12 + 90) / 17)


def test_siblings_that_are_always_equal_tell_all():
    found = lengths(*([(4, 4), (9, 9)] * (MIN_GROUPS // 2)))
    found.finished(50, 30)
    assert found.expected(50) == 30


def test_what_is_longer_than_expected_is_as_long_as_others_that_were():
    found = lengths((2, 4), (30, 50))
    assert found.expected(9, written=25) == 40, "of 30 and 50"
    assert found.expected(9, written=40) == 50
    assert found.expected(9, written=60) == 100, "nothing was, and twice as long is beyond the limit"
    assert lengths((2, 4), (30, 40)).expected(9, written=41) == 82


def test_what_a_probe_tells_is_nearer_than_the_mean_where_siblings_are_alike():
    chance = np.random.default_rng(0)
    found = Lengths(group_size=4, max_tokens=10_000)
    errors: list[tuple[float, float]] = []
    for group_id in range(400):
        shared = chance.lognormal(5.0, 0.8)
        group = np.maximum(1, np.rint(shared * chance.lognormal(0.0, 0.4, 4))).astype(int).tolist()
        before = found.expected(group_id)
        found.finished(group_id, group[0])
        after = found.expected(group_id)
        for one in group[1:]:
            errors.append((abs(before - one), abs(after - one)))
            found.finished(group_id, one)
    without, with_probe = np.array(errors[400:]).mean(axis=0)
    assert with_probe < 0.75 * without


def test_area_is_the_sum_over_passes():
    """A prompt of 3 and 4 tokens: a pass that writes token i holds between 3 + i and 3 + i + 1, so 3 * 4 + 16 / 2."""
    assert kv_token_passes(3, 4) == 20


def test_the_peak_of_a_cache_by_hand():
    """(10 held, 1 to come), (4, 5): after one pass 11 + 5 = 16, then the first leaves; after five 9."""
    assert peak_tokens([(10, 1), (4, 5)]) == 16
    assert peak_tokens([(1, 1), (4, 20)]) == 24, "the long one alone, at its end"
    assert peak_tokens([]) == 0


def test_the_peak_is_that_of_counting_every_pass():
    chance = np.random.default_rng(1)
    for num in itertools.chain(range(1, 9), [20]):
        held = [(float(now), float(to_come)) for now, to_come in chance.integers(0, 30, (num, 2))]
        by_pass = max(sum(now + at for now, to_come in held if to_come >= at) for at in range(31))
        assert peak_tokens(held) == by_pass
