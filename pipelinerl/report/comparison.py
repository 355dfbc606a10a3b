"""Runs side by side: one self-contained page that shows what was set otherwise, what came of it, and where each run's time went.

The first run is the reference: the others' numbers stand beside it with their ratio to it. Times count from the first token on, so that
models that load slowly do not shift a curve.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from pipelinerl.errors import DataError
from pipelinerl.report import counters
from pipelinerl.report.diagnosis import Diagnosis, diagnose
from pipelinerl.report.figures import RATE_POINTS, RATE_SHORTEST_S, rolling_mean
from pipelinerl.report.headline import Headline, headline
from pipelinerl.report.markup import flat, table
from pipelinerl.report.panels import figure, missing, time_unit
from pipelinerl.report.reading import Tables, has_journal, read_tables
from pipelinerl.report.style import STYLE
from pipelinerl.report.svg import Plot, Point, tag, words
from pipelinerl.report.units import NOT_RECORDED, duration, milliseconds, percent, quantity, whole

COLOURS = ("c-engine", "c-train", "c-warm", "c-score", "c-swap")
"""One for each run; with more, lines could not be told apart."""
IGNORED_SETTINGS = ("run.name", "run.folder", "engine.cores", "trainer.cores")
"""Settings that differ without a meaning."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One column of the page."""

    name: str
    css: str
    tables: Tables
    numbers: Headline
    diagnosis: Diagnosis


def write_comparison(run_folders: Sequence[Path], *, path: Path) -> Path:
    """Write the page. Raises `DataError` for fewer than two runs, too many, or a folder without a journal."""
    if not 2 <= len(run_folders) <= len(COLOURS):
        raise DataError(f"{len(run_folders)} runs named; a comparison is of two to {len(COLOURS)}")
    for folder in run_folders:
        has_journal(folder)
    unfinished = path.with_suffix(f".{os.getpid()}.html")
    unfinished.write_text(comparison([read_tables(folder) for folder in run_folders]), encoding="utf-8")
    unfinished.replace(path)
    return path


def comparison(all_tables: Sequence[Tables]) -> str:
    """The page as text."""
    runs = [
        Run(name=name, css=css, tables=tables, numbers=headline(tables), diagnosis=diagnose(tables))
        for name, css, tables in zip(_names(all_tables), COLOURS, all_tables, strict=False)
    ]
    sections = (
        ("numbers", "Numbers", _numbers(runs)),
        ("curves", "Curves", tag("div", "".join(_curves(runs)), css="figures")),
        ("diagnosis", "Diagnosis", _diagnoses(runs)),
        ("settings", "Settings that differ", _settings(runs)),
    )
    body = "".join(tag("section", tag("h2", words(title)) + content, id=name) for name, title, content in sections)
    title = " and ".join(run.name for run in runs)
    keys = "".join(tag("span", tag("i", css=f"key {run.css}") + words(run.name), css="keys") for run in runs)
    top = tag("header", tag("h1", words(title)) + tag("div", keys, css="legend"))
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += tag("title", words(f"{title}: comparison")) + tag("style", STYLE)
    return "<!DOCTYPE html>\n" + tag("html", tag("head", head) + tag("body", top + tag("main", body)), lang="en") + "\n"


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
    ("samples per second", lambda run: _per_second(run), quantity),
    ("generated tokens per second", lambda run: run.numbers.generated_tokens_per_s, quantity),
    ("trained tokens per second", lambda run: run.numbers.trained_tokens_per_s, quantity),
    ("trainer waited for micro-batches", lambda run: run.diagnosis.trainer_wait_fraction, percent),
    ("engines without a request", lambda run: run.diagnosis.engine_wait_fraction, percent),
    ("staleness, mean", lambda run: run.numbers.staleness_mean, quantity),
    ("pause of a swap, p99", lambda run: run.numbers.pause_p99_s, milliseconds),
)


def _numbers(runs: Sequence[Run]) -> str:
    rows = []
    for name, value_of, written in _NUMBERS:
        values = [value_of(run) for run in runs]
        cells = [words(written(value)) + ("" if written is percent else _ratio(value, values[0])) for value in values[1:]]
        rows.append([words(name), words(written(values[0])), *cells])
    return table(["", *(run.name for run in runs)], rows, name="numbers")


def _ratio(value: float | None, reference: float | None) -> str:
    if value is None or not reference:
        return ""
    return tag("span", words(f" ×{value / reference:.2f}"), css="note")


def _worked_s(tables: Tables) -> float | None:
    return None if tables.ended is None or tables.worked_from is None else tables.ended - tables.worked_from


def _per_second(run: Run) -> float | None:
    measured = run.numbers.measured
    if measured is None:
        return None
    samples = counters.total(step.num_samples for step in run.tables.steps if measured.first_step <= step.step <= measured.last_step)
    return None if samples is None else samples / measured.window_s


def _curves(runs: Sequence[Run]) -> list[str]:
    longest_s = max((_worked_s(run.tables) or 0.0 for run in runs), default=0.0)
    unit_s, unit = time_unit(longest_s)
    after = f"{unit} since the first token"

    def at(run: Run, t: float) -> float:
        return (t - (run.tables.worked_from or t)) / unit_s

    def reward(run: Run, x_of: Callable[[int], float]) -> list[Point]:
        points = [(x_of(number), step.reward_mean) for number, step in enumerate(run.tables.steps) if step.reward_mean is not None]
        return rolling_mean(points, width=max(1, len(points) // 20))

    def samples(run: Run) -> list[float]:
        so_far = [0.0]
        for step in run.tables.steps:
            so_far.append(so_far[-1] + (step.num_samples or 0.0))
        return so_far[1:]

    def generated(run: Run) -> list[Point]:
        told = [(row.t, row.generated_tokens) for row in run.tables.statuses if row.generated_tokens is not None]
        return [(at(run, t), rate) for t, rate in counters.rate_points(told, num_points=RATE_POINTS, shortest_s=RATE_SHORTEST_S)]

    def staleness(run: Run) -> list[Point]:
        return [(float(step.step), step.staleness_mean) for step in run.tables.steps if step.staleness_mean is not None]

    by_time = [reward(run, lambda number, run=run: at(run, run.tables.steps[number].t)) for run in runs]
    return [
        _curve(runs, by_time, title="Reward over time", x_label=after, y_label="mean reward"),
        _curve(
            runs,
            [reward(run, samples(run).__getitem__) for run in runs],
            title="Reward over samples",
            x_label="samples trained",
            y_label="mean reward",
        ),
        _curve(
            runs, [generated(run) for run in runs], title="Tokens generated per second", x_label=after, y_label="tokens/s", from_zero=True
        ),
        _curve(
            runs,
            [staleness(run) for run in runs],
            title="Staleness per step",
            x_label="step",
            y_label="versions, mean",
            from_zero=True,
            by_step=True,
        ),
    ]


def _curve(
    runs: Sequence[Run],
    lines: Sequence[Sequence[Point]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    from_zero: bool = False,
    by_step: bool = False,
) -> str:
    points = [point for line in lines for point in line]
    if not points:
        return figure(title, missing(title))
    plot = Plot(
        label=title,
        x_values=[0.0, *(x for x, _ in points)],
        y_values=[y for _, y in points],
        x_label=x_label,
        y_label=y_label,
        y_from_zero=from_zero,
        x_is_whole=by_step,
    )
    for run, line in zip(runs, lines, strict=True):
        plot.line(line, css=run.css)
    return figure(title, plot.svg(), legend=[(run.name, run.css) for run in runs])


def _diagnoses(runs: Sequence[Run]) -> str:
    parts = [
        tag("h3", tag("i", css=f"key {run.css}") + words(run.name))
        + tag("p", words(run.diagnosis.verdict))
        + (tag("p", tag("strong", "What to change: ") + words(run.diagnosis.advice)) if run.diagnosis.advice else "")
        for run in runs
    ]
    found = [{finding.what: finding.value for finding in run.diagnosis.findings} for run in runs]
    names = list(dict.fromkeys(finding.what for run in runs for finding in run.diagnosis.findings))
    rows = [[words(name), *(words(values.get(name, NOT_RECORDED)) for values in found)] for name in names]
    return "".join(parts) + table(["where the time went", *(run.name for run in runs)], rows, name="arithmetic")


def _settings(runs: Sequence[Run]) -> str:
    flattened = [{key: "none" if value is None else str(value) for key, value in flat(run.tables.config)} for run in runs]
    keys = list(dict.fromkeys(key for settings in flattened for key in settings))
    differ = [key for key in keys if key not in IGNORED_SETTINGS and len({settings.get(key) for settings in flattened}) > 1]
    if not differ:
        return tag("p", "None: the runs were set alike.")
    rows = [[tag("code", words(key)), *(words(settings.get(key, NOT_RECORDED)) for settings in flattened)] for key in differ]
    return table(["key", *(run.name for run in runs)], rows, name="settings", first_number=99)
