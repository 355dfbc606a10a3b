"""The reward functions that come with the system, on values worked by hand."""

from __future__ import annotations

import pytest

from pipelinerl.scorer.builtin import exact_match, length_penalty, overlong_penalty, regex_match
from pipelinerl.scorer.calls import Component
from pipelinerl.scorer.rewards import Shape, load_rewards


def test_exact_match_ignores_white_space_around_but_not_within() -> None:
    assert exact_match(" 42\n", answer="42") == 1.0
    assert exact_match("42", answer=42) == 1.0
    assert exact_match("4 2", answer="42") == 0.0
    assert exact_match("A", answer="a") == 0.0


def test_regex_match_searches_anywhere() -> None:
    assert regex_match("so <answer>7</answer>.", pattern=r"<answer>\d</answer>") == 1.0
    assert regex_match("so 7", pattern=r"<answer>\d</answer>") == 0.0


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(16384, 0.0), (1, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0)],
)
def test_overlong_penalty_with_the_bounds_of_dapo(num_tokens: int, penalty: float) -> None:
    assert overlong_penalty(num_tokens, max_tokens=20480, buffer_tokens=4096) == penalty
    assert overlong_penalty(num_tokens, max_tokens=20480, buffer_tokens=4096, factor=2.0) == 2.0 * penalty


def test_length_penalty_begins_at_four_fifths_of_the_run_s_longest_completion() -> None:
    assert [length_penalty("", num_tokens=n, max_tokens=100) for n in (80, 90, 100)] == [0.0, -0.5, -1.0]
    assert length_penalty("", num_tokens=3, max_tokens=3) == -1.0


def test_every_builtin_has_our_shape() -> None:
    names = ("exact_match", "regex_match", "length_penalty")
    rewards = load_rewards([Component(function=f"pipelinerl.scorer.builtin:{name}", weight=1.0) for name in names])
    assert {reward.shape for reward in rewards} == {Shape.OURS}
