"""What stretches of time cover of others, held to sums over all pairs."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.simulate.stretches import Stretch, Stretches

UNIX_S = 1.76e9


def drawn(seed: int, *, num: int, longest: float) -> list[Stretch]:
    chance = np.random.default_rng(seed)
    starts = UNIX_S + chance.uniform(0.0, 1000.0, num)
    return list(zip(starts.tolist(), (starts + chance.uniform(0.0, longest, num)).tolist(), strict=True))


@pytest.mark.parametrize("longest", [1.0, 50.0])
def test_what_they_cover_is_the_sum_over_all_pairs(longest: float):
    some, others = drawn(0, num=60, longest=longest), drawn(1, num=40, longest=10.0)
    expected = sum(max(0.0, min(end, until) - max(start, since)) for start, end in others for since, until in some)
    assert expected > 5.0, "they do cover some"
    assert Stretches(some).covered_s(others) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("longest", [1.0, 400.0])
def test_those_within_two_moments_are_cut_there(longest: float):
    some = sorted(drawn(0, num=60, longest=longest))
    for start in np.linspace(UNIX_S - 10.0, UNIX_S + 1410.0, 50).tolist():
        expected = [(max(start, since), min(start + 20.0, until)) for since, until in some if since < start + 20.0 and until > start]
        assert np.allclose(Stretches(some).within(start, start + 20.0), expected, rtol=0.0, atol=1e-6) if expected else True
        assert len(Stretches(some).within(start, start + 20.0)) == len(expected)


def test_none_cover_nothing():
    assert not Stretches([])
    assert Stretches([]).covered_s([(0.0, 1.0)]) == 0.0
    assert Stretches([]).within(0.0, 1.0) == []
    assert Stretches([(0.0, 1.0)]).covered_s([]) == 0.0
    assert not Stretches([]).merged()


def test_what_overlaps_is_merged():
    merged = Stretches([(5.0, 6.0), (0.0, 3.0), (1.0, 2.0), (2.5, 4.0), (6.0, 7.0)]).merged()
    assert merged.within(0.0, 10.0) == [(0.0, 4.0), (5.0, 7.0)]
    assert merged.covered_s([(0.0, 10.0)]) == pytest.approx(6.0)
