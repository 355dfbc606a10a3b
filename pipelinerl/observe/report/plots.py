"""Figures as data: lines, dots, rules and bars over two axes.

`templates/plots.js` draws them with uPlot where scripts run; elsewhere the page shows their numbers as a table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pipelinerl.observe.fold.rows import StepRow
from pipelinerl.observe.report.reading import Tables
from pipelinerl.observe.report.units import quantity

Point = tuple[float, float]
COLOURS = ("engine", "train", "warm", "score", "swap")
"""Colours of lines of one kind, in order: variables of the style sheet. With more, lines could not be told apart."""

MAX_POINTS = 400
"""Points of one line. A plot is about 460 pixels wide, so more cannot be seen; they only make the page heavy."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One series."""

    name: str
    colour: str
    """Variable of the style sheet, which decides light and dark."""
    points: Sequence[Point]
    """(x, y), in any order."""
    style: str = "line"
    """`line`, `faint`, `dots`, `rule` (dashed) or `bars`."""
    says: Sequence[str] = ()
    """Words for each point, in place of its value; empty, or as many as points. Such a line is not thinned."""

    def data(self) -> dict[str, Any]:
        """Columns of increasing x for the script: two swaps at one instant are drawn beside each other."""
        points = sorted(self.points) if self.says else decimate(sorted(self.points))
        order = sorted(range(len(self.points)), key=lambda at: self.points[at]) if self.says else ()
        xs: list[float] = []
        for x, _ in points:
            xs.append(_short(x, digits=8) if not xs or _short(x, digits=8) > xs[-1] else xs[-1] + 1e-6 * (abs(xs[-1]) or 1.0))
        ys = [_short(y, digits=5) for _, y in points]
        return {"name": self.name, "colour": self.colour, "style": self.style, "x": xs, "y": ys, "says": [self.says[at] for at in order]}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A titled plot. One without points is shown as `not recorded`."""

    title: str
    lines: Sequence[Line]
    x_label: str = "step"
    y_label: str = ""
    note: str = ""
    x_from: float | None = None
    """The beginning of the x axis; None: the first point."""
    from_zero: bool = False
    is_log: bool = False
    names: Sequence[str] = ()
    """Words below each bar; empty where there are none."""

    @property
    def drawn(self) -> list[Line]:
        """The lines that have points."""
        return [line for line in self.lines if line.points]

    def data(self) -> dict[str, Any]:
        """The figure as the script draws it."""
        options = {"x": self.x_label, "from": self.x_from, "zero": self.from_zero, "log": self.is_log, "names": self.names}
        return {**options, "whole": self.x_label == "step", "lines": [line.data() for line in self.drawn]}

    def summary(self) -> list[tuple[str, ...]]:
        """Rows of numbers for who sees no drawing: of a line its name, first, lowest, highest and last value; each bar with its words."""
        if self.names:
            (bars,) = self.lines
            return [(name, quantity(y), says) for name, (_, y), says in zip(self.names, bars.points, bars.says, strict=True)]
        return [(line.name or self.title, *(quantity(y) for y in _extent(line.points))) for line in self.drawn]


def by_step(
    tables: Tables, title: str, y_label: str, *series: tuple[str, str, Callable[[StepRow], float | None]], **options: Any
) -> Figure:
    """A figure of numbers of each step; a series is a name, a colour, and how to read the number off a step."""
    lines = [
        Line(name=name, colour=colour, points=[(float(row.step), y) for row in tables.steps if (y := value_of(row)) is not None])
        for name, colour, value_of in series
    ]
    return Figure(title=title, y_label=y_label, lines=lines, **options)


def over_time(tables: Tables, title: str, y_label: str, *lines: Line, **options: Any) -> Figure:
    """A figure over the time at work; the points' x are Unix seconds. Start-up, in which models load, would squeeze a short run's rest."""
    unit_s, unit = time_unit(tables.duration_s)
    start = tables.worked_from or 0.0
    moved = [
        dataclasses.replace(line, points=[(tables.since_start(t) / unit_s, y) for t, y in line.points if line.says or t >= start])
        for line in lines
    ]
    x_from = tables.since_start(start) / unit_s if start else 0.0
    return Figure(title=title, y_label=y_label, lines=moved, x_label=f"{unit} since the run began", x_from=x_from, **options)


def time_unit(duration_s: float | None) -> tuple[float, str]:
    """Seconds of the unit that suits an axis of such a length, and its name."""
    if duration_s is None or duration_s < 600:
        return 1.0, "seconds"
    return (60.0, "minutes") if duration_s < 3 * 3600 else (3600.0, "hours")


def decimate(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most about `limit` points, given in order of x: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    size = -(-len(points) * 2 // limit)
    kept = {points[0], points[-1]}
    for at in range(0, len(points), size):
        stretch = points[at : at + size]
        kept |= {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
    return sorted(kept)


def _extent(points: Sequence[Point]) -> tuple[float, float, float, float]:
    ys = [y for _, y in sorted(points)]
    return ys[0], min(ys), max(ys), ys[-1]


def _short(value: float, *, digits: int) -> float:
    """The number as it is written into the page."""
    return float(f"{value:.{digits}g}")
