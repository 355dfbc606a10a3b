"""The quantile of gaps over a whole step, against the sorted gaps themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trainer.logprob_quantile import GapQuantile


def alone(counts: torch.Tensor) -> torch.Tensor:
    return counts


def quantile_of(*rows: list[float]) -> float | None:
    gaps = GapQuantile(torch.device("cpu"))
    for row in rows:
        gaps.add(torch.tensor(row), inside=torch.ones(len(row), dtype=torch.bool))
    return gaps.take(alone)


@pytest.mark.parametrize("num", [1000, 1001, 5000, 40_000])
def test_it_is_the_sorted_one_rounded_up_by_at_most_a_32nd_whatever_the_size_of_gaps(num: int) -> None:
    gaps = np.exp(np.random.default_rng(num).normal(-9, 4, num)).astype(np.float32)
    exact = float(np.sort(gaps)[math.ceil(0.999 * num) - 1])
    found = quantile_of(*(part.tolist() for part in np.array_split(gaps, 7)))
    assert found is not None
    assert exact <= found <= exact * 33 / 32


def test_two_in_a_thousand_are_seen_and_one_is_not() -> None:
    assert quantile_of([1e-5] * 999, [0.5]) == pytest.approx(1e-5, rel=1 / 32)
    assert quantile_of([1e-5] * 998, [0.5] * 2) == pytest.approx(0.5, rel=1 / 32)
    assert quantile_of([0.0] * 1000) == pytest.approx(0.0, abs=1e-30)


def test_of_fewer_than_a_thousand_there_is_none() -> None:
    assert quantile_of([0.1] * 999) is None
    assert quantile_of() is None


def test_tokens_outside_do_not_count_and_no_number_is_the_largest() -> None:
    gaps = GapQuantile(torch.device("cpu"))
    gaps.add(torch.full((2000,), 0.25), inside=torch.arange(2000) < 1000)
    gaps.add(torch.full((500,), torch.nan), inside=torch.zeros(500, dtype=torch.bool))
    assert gaps.take(alone) == pytest.approx(0.25, rel=1 / 32)
    assert math.isnan(quantile_of([0.25] * 998, [math.nan, -math.nan]) or 0.0)


def test_counts_of_all_ranks_are_one_step_and_the_next_step_begins_anew() -> None:
    gaps = GapQuantile(torch.device("cpu"))
    gaps.add(torch.full((600,), 0.25), inside=torch.ones(600, dtype=torch.bool))
    assert gaps.take(lambda counts: 2 * counts) == pytest.approx(0.25, rel=1 / 32)
    assert gaps.take(lambda counts: 2 * counts) is None
