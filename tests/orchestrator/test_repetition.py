"""Repetition: the part of a sample's 4-grams that it has said before, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.rules.repetition import LEAST_TOKENS, MOST_TOKENS, NGRAM, repeated_fraction


def test_a_loop_repeats_all_but_its_first_turn():
    # 40 tokens have 37 4-grams; a loop of five has five distinct ones.
    assert repeated_fraction([np.arange(40) % 5]) == pytest.approx(1 - 5 / 37)


def test_what_says_nothing_twice_repeats_nothing():
    assert repeated_fraction([np.arange(40)]) == 0.0


def test_it_is_the_mean_over_samples_that_are_long_enough():
    assert repeated_fraction([np.arange(40), np.zeros(40, int), np.zeros(LEAST_TOKENS - 1, int)]) == pytest.approx((0 + 36 / 37) / 2)
    assert repeated_fraction([np.zeros(LEAST_TOKENS - 1, int)]) is None
    assert repeated_fraction([]) is None


def test_of_a_long_sample_the_end_counts_where_loops_are():
    sample = np.concatenate([np.arange(5000), np.zeros(MOST_TOKENS, int)])
    assert repeated_fraction([sample]) == pytest.approx(1 - 1 / (MOST_TOKENS - NGRAM + 1))
