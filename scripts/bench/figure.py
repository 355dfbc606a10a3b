"""Lines over two axes as a file of their own, for the README, which runs no script: axes, lines and a legend in a template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from pipelinerl.observe.report.plots import Point
from pipelinerl.observe.report.timeline import round_values

COLOURS = ("#4a86d0", "#e05050", "#2f9e6b", "#9a5fd0", "#c98512", "#8d98a5")
"""Readable on white and on black, so that the file needs no second set."""
LEFT, RIGHT, TOP, BOTTOM = 50, 530, 30, 260

_FIGURE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 300"
     font-family="system-ui, sans-serif" font-size="11.5" fill="#77818c">
<title>{{ label }}</title>
<text x="4" y="13">{{ y_label }}</text><text x="{{ right }}" y="295" text-anchor="end">{{ x_label }}</text>
{% for at, words in y_ticks %}
<path d="M{{ left }} {{ at }}H{{ right }}" stroke="#8888" stroke-width=".5"/>
<text x="{{ left - 7 }}" y="{{ at + 4 }}" text-anchor="end">{{ words }}</text>
{% endfor %}
{% for at, words in x_ticks %}
<path d="M{{ at }} {{ bottom }}v4" stroke="#888"/><text x="{{ at }}" y="{{ bottom + 16 }}" text-anchor="middle">{{ words }}</text>
{% endfor %}
{% for name, colour, points in lines %}
<polyline points="{{ points }}" fill="none" stroke="{{ colour }}" stroke-width="1.8" stroke-linejoin="round"/>
<text x="{{ right + 14 }}" y="{{ 44 + 18 * loop.index0 }}" fill="{{ colour }}">{{ name }}</text>
{% endfor %}
</svg>
"""


def write_lines(path: Path, series: Mapping[str, Sequence[Point]], *, label: str, x_label: str, y_label: str) -> None:
    """Draw each series in a colour of its own, first to last, y from zero, and write the figure to `path`."""
    points = [point for line in series.values() for point in line]
    (x_low, x_high), y_high = _extent([x for x, _ in points]), _extent([0.0, *(y for _, y in points)])[1]

    def x_at(x: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (x - x_low) / (x_high - x_low), 1)

    def y_at(y: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * y / y_high, 1)

    drawn = jinja2.Template(_FIGURE, autoescape=True, trim_blocks=True).render(
        label=label,
        x_label=x_label,
        y_label=y_label,
        left=LEFT,
        right=RIGHT,
        bottom=BOTTOM,
        x_ticks=[(x_at(x), f"{x:g}") for x in round_values(x_low, x_high, count=8)],
        y_ticks=[(y_at(y), f"{y:g}") for y in round_values(0.0, y_high, count=4)],
        lines=[
            (name, colour, " ".join(f"{x_at(x)},{y_at(y)}" for x, y in line))
            for (name, line), colour in zip(series.items(), COLOURS, strict=False)
        ],
    )
    path.write_text(drawn)


def _extent(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return low, high if high > low else low + 1.0
