"""What every figure of the report is set in: its title, note and legend, the sentence where there is nothing to draw, and the two
commonest plots, of numbers by step and over time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipelinerl.report.reading import Tables
from pipelinerl.report.rows import StepRow
from pipelinerl.report.svg import Plot, Point, tag, words
from pipelinerl.report.units import NOT_RECORDED


def figure(title: str, drawn: str, *, note: str = "", legend: Sequence[tuple[str, str]] = (), css: str = "") -> str:
    """A titled figure; `legend` pairs words with a colour class."""
    keys = "".join(tag("span", tag("i", css=f"key {colour}") + words(name), css="keys") for name, colour in legend if name)
    caption = tag("strong", words(title)) + (tag("span", words(note), css="note") if note else "")
    return tag("figure", tag("figcaption", caption) + (tag("div", keys, css="legend") if keys else "") + drawn, css=css)


def missing(what: str) -> str:
    """The sentence in place of a plot."""
    return tag("p", words(f"{what}: {NOT_RECORDED}."), css="missing")


def by_step(
    tables: Tables,
    *,
    title: str,
    y_label: str,
    series: Sequence[tuple[str, str, Callable[[StepRow], float | None]]],
    y_from_zero: bool = False,
) -> str:
    """A figure of numbers of each step; a series is a name for the legend, a colour class, and how to read the number off a step."""
    lines = [
        (name, colour, [(float(row.step), value) for row in tables.steps if (value := value_of(row)) is not None])
        for name, colour, value_of in series
    ]
    return _lines(lines, title=title, x_label="step", y_label=y_label, x_is_whole=True, y_from_zero=y_from_zero)


def over_time(tables: Tables, *, title: str, y_label: str, series: Sequence[tuple[str, str, Sequence[Point]]]) -> str:
    """A figure over the time at work, values from zero; a series is a legend's name, a colour class, points (Unix seconds, value)."""
    unit_s, unit = time_unit(tables.duration_s)
    lines = [
        (name, colour, [(tables.since_start(t) / unit_s, y) for t, y in points if t >= (tables.worked_from or 0.0)])
        for name, colour, points in series
    ]
    return _lines(
        lines, title=title, x_label=f"{unit} since the run began", y_label=y_label, x_from=(start_of_axis(tables),), y_from_zero=True
    )


def start_of_axis(tables: Tables) -> float:
    """Where a time axis begins, in its unit: start-up, in which models load, would squeeze the rest of a short run."""
    return tables.since_start(tables.worked_from or 0.0) / time_unit(tables.duration_s)[0] if tables.worked_from else 0.0


def time_unit(duration_s: float | None) -> tuple[float, str]:
    """Seconds of the unit that suits an axis of such a length, and its name."""
    if duration_s is None or duration_s < 600:
        return 1.0, "seconds"
    return (60.0, "minutes") if duration_s < 3 * 3600 else (3600.0, "hours")


def _lines(
    lines: Sequence[tuple[str, str, Sequence[Point]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_from: tuple[float, ...] = (),
    x_is_whole: bool = False,
    y_from_zero: bool,
) -> str:
    lines = [(name, colour, points) for name, colour, points in lines if points]
    if not lines:
        return figure(title, missing(title))
    plot = Plot(
        label=title,
        x_values=[*x_from, *(x for _, _, points in lines for x, _ in points)],
        y_values=[y for _, _, points in lines for _, y in points],
        x_label=x_label,
        y_label=y_label,
        x_is_whole=x_is_whole,
        y_from_zero=y_from_zero,
    )
    for _, colour, points in lines:
        plot.line(points, css=colour)
    return figure(title, plot.svg(), legend=[(name, colour) for name, colour, _ in lines] if len(lines) > 1 else ())
