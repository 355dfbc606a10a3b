"""Lines over two axes as a file of their own, for the README: the report's plots with a legend, its colours and no other dependency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipelinerl.report.style import STYLE
from pipelinerl.report.svg import Plot, Point, tag, words

COLOURS = ("c-engine", "c-swap", "c-score", "c-train", "c-warm", "c-wait")


def write_lines(path: Path, series: dict[str, Sequence[Point]], *, label: str, x_label: str, y_label: str) -> None:
    """Draw each series in a colour of its own, first to last, and write the figure to `path`."""
    points = [point for line in series.values() for point in line]
    plot = Plot(
        label=label,
        x_values=[x for x, _ in points],
        y_values=[y for _, y in points],
        x_label=x_label,
        y_label=y_label,
        y_from_zero=True,
        right=190,
        width=720,
        height=300,
    )
    legend = []
    for number, ((name, line), css) in enumerate(zip(series.items(), COLOURS, strict=False)):
        plot.line(line, css=css)
        legend.append(tag("text", words(name), x=544, y=44 + 18 * number, css=f"label {css}"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" style="background: var(--paper)" viewBox="0 0 {plot.width} {plot.height}"'
    body = plot.svg().replace(f'<svg viewBox="0 0 {plot.width} {plot.height}"', head, 1)
    start = body.index(">") + 1
    path.write_text(body[:start] + tag("style", STYLE) + body[start : -len("</svg>")] + "".join(legend) + "</svg>\n")
