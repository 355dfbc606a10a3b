"""What the bench of elastic roles reads out of a journal, on lines written by hand."""

from __future__ import annotations

from typing import Any

from scripts.bench.elastic_runs.live import Watched
from scripts.bench.elastic_runs.told import decisions_of, went_and_came_back

Line = dict[str, Any]
WEIGHED = {"speed_now": 500.0, "speed_then": 900.0}


def roles(t: float, word: str, before: tuple[int, ...], after: tuple[int, ...], *, written: float | None = None) -> Line:
    names = ("engines", "trainer", "scorers", "tensor_parallel_size")
    numbers = dict(zip(names, before, strict=True)) | {f"{name}_then": count for name, count in zip(names, after, strict=True)}
    figures = {} if written is None else WEIGHED | {"written_rate": written}
    return {"t": t, "kind": "roles", "word": word, "step": int(t)} | numbers | figures


BEGAN, OTHER, WIDE = (3, 1, 0, 1), (2, 2, 0, 1), (1, 1, 0, 2)
THERE, BACK = (BEGAN, OTHER), (OTHER, BEGAN)
LINES: list[Line] = [
    {"t": 90.0, "kind": "start"},
    roles(100.0, "begins", *THERE, written=480.0),
    {"t": 102.0, "kind": "trainer_ranks", "phase": "saving"},
    {"t": 103.0, "kind": "trainer_ranks", "phase": "starting"},
    {"t": 110.0, "kind": "trainer_ranks", "phase": "settled"},
    roles(112.0, "taken", *THERE),
    roles(140.0, "stays", OTHER, OTHER, written=600.0),
    roles(170.0, "begins", *BACK, written=450.0),
    roles(185.0, "taken", *BACK),
]


def test_a_change_is_held_against_the_next_whole_window() -> None:
    there, taken, stays, back, _ = decisions_of(LINES)
    assert (there.at_s, there.before, there.after, there.written, there.written_next) == (10.0, BEGAN, OTHER, 480.0, 600.0)
    assert (there.taken_s, there.away_s, there.foretold_over_written) == (12.0, 7.0, 1.5)
    assert (taken.speed_now, taken.foretold_over_written, stays.foretold_over_written) == (None, None, None)
    assert (back.taken_s, back.away_s, back.written_next) == (15.0, 0.0, None), "no window was whole after it"


def test_a_change_that_is_taken_back_was_not_taken() -> None:
    (there,) = decisions_of([LINES[1]])
    assert (there.taken_s, there.written_next) == (None, None)
    there, _ = decisions_of([LINES[1], roles(112.0, "taken back", OTHER, BEGAN)])
    assert there.taken_s is None


def test_devices_are_back_once_the_run_has_the_layout_that_it_began_with() -> None:
    assert went_and_came_back(decisions_of(LINES), role="trainer") == (True, True)
    assert went_and_came_back(decisions_of(LINES[:-1]), role="trainer") == (True, False)
    assert went_and_came_back(decisions_of(LINES), role="scorers") == (False, False)
    assert went_and_came_back(decisions_of(LINES[:2]), role="trainer") == (False, False), "an order is no change yet"


def test_answers_become_long_after_a_whole_window_and_the_run_ends_after_one_more() -> None:
    watched, began, other = Watched("prm"), (3, 1, 1, 1), (2, 1, 2, 1)
    for line in (roles(100.0, "begins", began, other, written=480.0), roles(112.0, "taken", began, other)):
        watched.take(line)
    assert (watched.went, watched.is_measured) == (True, False)
    watched.take(roles(140.0, "stays", other, other, written=600.0))
    assert (watched.is_measured, watched.came_back) == (True, False)
    for line in (roles(170.0, "begins", other, began, written=450.0), roles(185.0, "taken", other, began)):
        watched.take(line)
    assert (watched.came_back, watched.is_over) == (True, False)
    watched.take(roles(220.0, "begins", began, other, written=700.0))
    assert watched.is_over


def test_where_lengths_stay_no_window_is_needed_between_there_and_back() -> None:
    watched, narrow = Watched("ranks"), (2, 1, 0, 1)
    watched.take(roles(100.0, "taken", narrow, WIDE))
    assert watched.went
    watched.take(roles(140.0, "begins", WIDE, narrow, written=300.0))
    watched.take(roles(150.0, "taken", WIDE, narrow))
    assert (watched.came_back, watched.is_over) == (True, False)
    lines = [roles(100.0, "taken", narrow, WIDE), roles(150.0, "taken", WIDE, narrow)]
    assert went_and_came_back(decisions_of(lines), role="tensor_parallel_size") == (True, True)
