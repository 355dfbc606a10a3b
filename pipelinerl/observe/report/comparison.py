"""Runs side by side: one self-contained page that shows what was set otherwise, what came of it, and where each run's time went.

The first run is the reference: the others' numbers stand beside it with their ratio to it. Times count from the first token on, so that
models that load slowly do not shift a curve.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from pipelinerl.errors import DataError
from pipelinerl.observe.fold import counters
from pipelinerl.observe.report.diagnosis import Diagnosis, diagnose
from pipelinerl.observe.report.figures import generated_rate, rolling_mean
from pipelinerl.observe.report.headline import Headline, headline
from pipelinerl.observe.report.listings import Cell, Table, flat, written
from pipelinerl.observe.report.measures import Measures
from pipelinerl.observe.report.page import render, write_whole
from pipelinerl.observe.report.plots import COLOURS, Figure, Line, Point, time_unit
from pipelinerl.observe.report.reading import Tables, has_journal, read_tables
from pipelinerl.observe.report.units import NOT_RECORDED, duration, milliseconds, percent, quantity, whole

IGNORED_SETTINGS = ("run.name", "run.folder", "run.cores", "engine.cores", "trainer.cores", "prm.cores")
"""Settings that differ without a meaning."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One column of the page."""

    name: str
    colour: str
    tables: Tables
    numbers: Headline
    diagnosis: Diagnosis


def write_comparison(run_folders: Sequence[Path], *, path: Path, modes: Table | None = None) -> Path:
    """Write the page, of runs in several modes with their table. Raises `DataError` for fewer than two runs, too many, or a folder without
    a journal.
    """
    if not 2 <= len(run_folders) <= len(COLOURS):
        raise DataError(f"{len(run_folders)} runs named; a comparison is of two to {len(COLOURS)}")
    return write_whole(path, comparison([read_tables(folder) for folder in map(has_journal, run_folders)], modes=modes))


def comparison(all_tables: Sequence[Tables], *, modes: Table | None = None) -> str:
    """The page as text."""
    runs = [
        Run(name=name, colour=colour, tables=tables, numbers=headline(tables), diagnosis=diagnose(tables))
        for name, colour, tables in zip(_names(all_tables), COLOURS, all_tables, strict=False)
    ]
    return render(
        "comparison.html",
        title=" and ".join(run.name for run in runs),
        runs=runs,
        modes=modes,
        numbers=_numbers(runs),
        curves=_curves(runs),
        times=_times(runs),
        settings=_settings(runs),
    )


def _names(all_tables: Sequence[Tables]) -> list[str]:
    """The runs' names; where two are called alike, those of their folders."""
    names = [tables.name for tables in all_tables]
    return names if len(set(names)) == len(names) else [tables.folder.name for tables in all_tables]


_Number = tuple[str, Callable[[Run], float | None], Callable[[float | None], str]]

_NUMBERS: tuple[_Number, ...] = (
    ("final reward", lambda run: run.numbers.final_reward, quantity),
    ("held-out reward, last", lambda run: run.numbers.held_out_after.reward_mean if run.numbers.held_out_after else None, quantity),
    ("optimizer steps", lambda run: float(run.numbers.num_steps_done), whole),
    ("samples trained", lambda run: run.numbers.num_samples, whole),
    ("seconds at work", lambda run: _worked_s(run.tables), duration),
    ("samples per second", lambda run: per_second(run.tables, run.numbers.measured), quantity),
    ("generated tokens per second", lambda run: run.numbers.generated_tokens_per_s, quantity),
    ("trained tokens per second", lambda run: run.numbers.trained_tokens_per_s, quantity),
    ("useful tokens per second", lambda run: run.numbers.useful_tokens_per_s, quantity),
    ("trainer waited for micro-batches", lambda run: run.diagnosis.trainer_wait_fraction, percent),
    ("engines without a request", lambda run: run.diagnosis.engine_wait_fraction, percent),
    ("staleness, mean", lambda run: run.numbers.staleness_mean, quantity),
    ("pause of a swap, p99", lambda run: run.numbers.pause_p99_s, milliseconds),
)


def _numbers(runs: Sequence[Run]) -> Table:
    rows: list[list[Cell]] = []
    for name, value_of, write in _NUMBERS:
        first, *others = (value_of(run) for run in runs)
        rows.append([name, write(first), *((write(value), "" if write is percent else _ratio(value, first)) for value in others)])
    return _side_by_side(runs, rows, name="numbers")


def _ratio(value: float | None, reference: float | None) -> str:
    return "" if value is None or not reference else f" ×{value / reference:.2f}"


def _worked_s(tables: Tables) -> float | None:
    return None if tables.ended is None or tables.worked_from is None else tables.ended - tables.worked_from


def per_second(tables: Tables, measured: Measures | None) -> float | None:
    """Return the samples trained per second in the steady stretch."""
    if measured is None:
        return None
    samples = counters.total(step.num_samples for step in tables.steps if measured.first_step <= step.step <= measured.last_step)
    return None if samples is None else samples / measured.window_s


def _curves(runs: Sequence[Run]) -> list[Figure]:
    unit_s, unit = time_unit(max((_worked_s(run.tables) or 0.0 for run in runs), default=0.0))

    def after(run: Run, points: Sequence[Point]) -> list[Point]:
        return [((t - (run.tables.worked_from or t)) / unit_s, y) for t, y in points]

    def reward(run: Run, xs: Sequence[float]) -> list[Point]:
        points = [(x, step.reward_mean) for x, step in zip(xs, run.tables.steps, strict=True) if step.reward_mean is not None]
        return rolling_mean(points, width=max(1, len(points) // 20))

    def samples(run: Run) -> list[float]:
        return list(itertools.accumulate(step.num_samples or 0.0 for step in run.tables.steps))

    def staleness(run: Run) -> list[Point]:
        return [(float(step.step), step.staleness_mean) for step in run.tables.steps if step.staleness_mean is not None]

    def curve(title: str, x_label: str, y_label: str, points_of: Callable[[Run], list[Point]], *, from_zero: bool = False) -> Figure:
        lines = [Line(name=run.name, colour=run.colour, points=points_of(run)) for run in runs]
        return Figure(title=title, lines=lines, x_label=x_label, y_label=y_label, x_from=0.0, from_zero=from_zero)

    time = f"{unit} since the first token"
    return [
        curve("Reward over time", time, "mean reward", lambda run: after(run, reward(run, [step.t for step in run.tables.steps]))),
        curve("Reward over samples", "samples trained", "mean reward", lambda run: reward(run, samples(run))),
        curve("Tokens generated per second", time, "tokens/s", lambda run: after(run, generated_rate(run.tables)), from_zero=True),
        curve("Staleness per step", "step", "versions, mean", staleness, from_zero=True),
    ]


def _times(runs: Sequence[Run]) -> Table:
    found = [{finding.what: finding.value for finding in run.diagnosis.findings} for run in runs]
    names = dict.fromkeys(name for values in found for name in values)
    rows = [[name, *(values.get(name, NOT_RECORDED) for values in found)] for name in names]
    return _side_by_side(runs, rows, name="arithmetic", heading="where the time went")


def _settings(runs: Sequence[Run]) -> Table:
    settings = [{key: written(value) for key, value in flat(run.tables.run.config)} for run in runs]
    keys = [key for key in dict.fromkeys(key for each in settings for key in each) if key not in IGNORED_SETTINGS]
    rows = [[key, *(each.get(key, NOT_RECORDED) for each in settings)] for key in keys if len({each.get(key) for each in settings}) > 1]
    return _side_by_side(runs, rows, name="settings", heading="key", kinds=("code", *["name"] * len(runs)))


def _side_by_side(
    runs: Sequence[Run], rows: Sequence[Sequence[Cell]], *, name: str, heading: str = "", kinds: Sequence[str] = ("name",)
) -> Table:
    return Table(name=name, headings=(heading, *(run.name for run in runs)), kinds=kinds, rows=rows)
