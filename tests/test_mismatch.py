"""Which engine's log-probabilities differ, on numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from pipelinerl.algorithms.mismatch import MIN_TOKENS, MismatchRule
from pipelinerl.messages import EngineMismatch


def engine(engine_id: int, kl: float, *, num_tokens: int = 1000, num_sequences: int = 12) -> EngineMismatch:
    return EngineMismatch(engine_id=engine_id, num_sequences=num_sequences, num_tokens=num_tokens, kl_sum=kl * num_tokens)


@pytest.mark.parametrize(
    ("engines", "found"),
    [
        ([engine(0, 0.001), engine(1, 0.4), engine(2, 0.001)], [1]),
        ([engine(0, 0.001), engine(1, 0.029), engine(2, 0.001)], []),
        ([engine(0, 0.02), engine(1, 0.19), engine(2, 0.02)], []),
        ([engine(0, 0.02), engine(1, 0.21), engine(2, 0.02)], [1]),
        ([engine(0, 0.001), engine(1, 0.4), engine(2, 0.5), engine(3, 0.001)], [1, 2]),
        ([engine(0, 0.001, num_tokens=99), engine(1, 0.4), engine(2, 0.5)], [1, 2]),
        ([engine(0, 0.001), engine(1, 5.0, num_tokens=MIN_TOKENS - 1)], []),
        ([engine(0, 0.001), engine(1, math.nan)], [1]),
        ([engine(0, 0.0), engine(1, 0.4)], [1]),
        ([engine(0, 0.4)], []),
        ([], []),
    ],
    ids=[
        "one that forges",
        "under the limit",
        "nine times as far as the others",
        "more than ten times",
        "two, who do not hide each other",
        "two of three",
        "too few tokens",
        "no number",
        "others agree exactly",
        "alone, it has nobody to differ from",
        "nobody",
    ],
)
def test_an_engine_stands_out_that_is_over_the_limit_and_far_from_the_others(engines: list[EngineMismatch], found: list[int]) -> None:
    assert [one.engine_id for one in MismatchRule(limit=0.03).stands_out(engines)] == found


def test_it_is_named_with_its_kl_and_that_of_the_others() -> None:
    said = MismatchRule(limit=0.03).words([engine(0, 0.001), engine(1, 0.4), engine(2, 0.001)])
    assert said == ["engine 1's log-probabilities differ: KL 0.4 over 12 sequences (others 0.001, trainer.max_mismatch_kl = 0.03)"]
