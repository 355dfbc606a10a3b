"""How long a pass takes, fitted to reports that follow from known seconds: 10 ms, 1 ms for each sequence, 2 us for each token read."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest

from orchestrator.rules.pass_profile import KEPT, LEAST_REPORTS, PassProfile, least_squares
from pipelinerl.messages import EngineLoad


def load(passes: int, num: int, context: int, *, since: EngineLoad | None = None, kv_used: float | None = None) -> EngineLoad:
    """A report after so many passes more, each for `num` sequences of `context` tokens."""
    tokens, read = passes * num, passes * num * context
    seconds = passes * 0.010 + tokens * 0.001 + read * 2e-6
    return EngineLoad(
        engine_id=0,
        version=0,
        num_running=num,
        num_waiting=0,
        num_tokens=tokens + (since.num_tokens if since else 0),
        num_steps=passes + (since.num_steps if since else 0),
        busy_s=seconds + (since.busy_s if since else 0.0),
        idle_s=0.0,
        kv_used=kv_used,
        num_context_tokens=read + (since.num_context_tokens if since else 0),
    )


def told(*reports: tuple[int, int, int], kv_tokens: float | None = None) -> PassProfile:
    profile, before = PassProfile(), load(0, 1, 1)
    for passes, num, context in reports:
        after = load(passes, num, context, since=before, kv_used=num * context / kv_tokens if kv_tokens else None)
        profile.reported(before, after)
        before = after
    return profile


VARIED = [(50, 4, 100), (40, 8, 100), (30, 16, 100), (50, 4, 400), (40, 8, 900), (30, 16, 300), (60, 2, 50), (20, 16, 1200)]


def test_what_a_pass_takes_is_found_and_foretold_for_other_numbers_and_contexts():
    fitted = told(*VARIED).fit()
    assert fitted is not None
    assert (fitted.a, fitted.b, fitted.c) == (pytest.approx(0.010), pytest.approx(0.001), pytest.approx(2e-6))
    assert fitted(32, 2000) == pytest.approx(0.010 + 0.032 + 0.128)


def test_where_engines_always_have_as_many_it_is_right_for_as_many():
    fitted = told(*[(40, 8, 100 + 50 * number) for number in range(9)]).fit()
    assert fitted is not None
    assert fitted(8, 1000) == pytest.approx(0.010 + 0.008 + 0.016)


def test_too_few_reports_and_passes_that_say_little_fit_nothing():
    assert told(*VARIED[: LEAST_REPORTS - 1]).fit() is None
    assert told(*VARIED[: LEAST_REPORTS - 1], (2, 4, 100)).fit() is None, "two passes are too few to be counted"
    assert told(*VARIED[:LEAST_REPORTS]).fit() is not None


def test_passes_that_took_no_time_fit_nothing():
    profile, before = PassProfile(), load(0, 1, 1)
    for _ in range(LEAST_REPORTS):
        after = load(10, 4, 100, since=before)
        profile.reported(_taking(before, 0.0), _taking(after, 0.0))
        before = after
    assert profile.fit() is None


def _taking(one: EngineLoad, busy_s: float) -> EngineLoad:
    return msgspec.structs.replace(one, busy_s=busy_s)


def test_old_reports_are_forgotten():
    profile, before = PassProfile(), load(0, 1, 1)
    for number in range(KEPT):  # passes that took no time, from before
        profile.reported(before, after := load(10, 4 + number % 3, 100, since=_taking(before, -1e-9)))
        before = after
    for number in range(KEPT):
        profile.reported(before, after := load(10, 4 + number % 3, 100 + number, since=before))
        before = after
    fitted = profile.fit()
    assert fitted is not None
    assert fitted.c == pytest.approx(2e-6)


def test_the_room_of_a_cache_is_what_it_holds_over_the_part_that_is_used():
    assert told(*VARIED, kv_tokens=50_000).room == pytest.approx(50_000)
    assert math.isinf(told(*VARIED).room), "nobody says"
    assert math.isinf(told((50, 1, 100), kv_tokens=50_000).room), "two thousandths of it say nothing"


@pytest.mark.parametrize("seed", range(20))
def test_no_choice_of_columns_is_better(seed: int):
    """Of all subsets of six columns whose best coefficients are above 0, two columns telling the same, none has a smaller error."""
    chance = np.random.default_rng(seed)
    parts = chance.random((30, 6)) * 10.0 ** chance.integers(-4, 5, 6)
    parts[:, 5] = 3 * parts[:, 2]
    seconds = parts[:, :4] @ (chance.normal(size=4) / parts[:, :4].mean(0)) + chance.normal(size=30)
    found = least_squares(parts, seconds)
    assert (found >= 0).all()
    errors = [float(np.square(seconds).sum())]
    for chosen in (list(some) for size in range(1, 6) for some in itertools.combinations(range(5), size)):
        best, *_ = np.linalg.lstsq(parts[:, chosen], seconds, rcond=None)
        if (best >= 0).all():
            errors.append(float(np.square(parts[:, chosen] @ best - seconds).sum()))
    assert float(np.square(parts @ found - seconds).sum()) == pytest.approx(min(errors), rel=1e-6)


def test_no_coefficient_is_below_zero():
    parts = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert least_squares(parts, np.array([3.0, 2.0, 1.0])).tolist() == pytest.approx([2.0, 0.0]), "the mean, and not 4 less 1 for each"
    assert least_squares(parts, np.array([1.5, 2.0, 2.5])).tolist() == pytest.approx([1.0, 0.5])
