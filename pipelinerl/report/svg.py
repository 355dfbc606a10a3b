"""Figures as inline SVG: elements, scales and one kind of plot. Colours are classes, so that the page's style sheet decides light and dark.

Nothing in a figure refers to anything outside the page. All text and all attribute values are escaped here, in `tag` and `words`.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence

Point = tuple[float, float]

MAX_POINTS = 400
"""Points of one line. A plot is about 460 pixels wide, so more cannot be seen; they only make the page heavy."""
FEW_POINTS = 24
"""Points of a line that are marked one by one; more would run into each other."""


def tag(name: str, content: str = "", **attributes: object) -> str:
    """One element. `content` is markup already; attribute values are escaped; `css` becomes `class`, underscores become hyphens."""
    renamed = (("class" if key == "css" else key.replace("_", "-"), value) for key, value in attributes.items())
    inner = "".join(f' {key}="{html.escape(pixels(value) if isinstance(value, float) else str(value))}"' for key, value in renamed)
    return f"<{name}{inner}>{content}</{name}>"


def words(value: str) -> str:
    """Text for use as markup."""
    return html.escape(value)


def pixels(value: float) -> str:
    """A coordinate with at most one decimal: a tenth of a pixel is finer than any screen."""
    return f"{value:.1f}".removesuffix(".0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Maps values to coordinates."""

    low: float
    high: float
    start: float
    """Coordinate of `low`."""
    end: float
    """Coordinate of `high`."""
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """The coordinate of a value; a value outside the domain is drawn at its border."""
        low, high, at = (math.log10(max(entry, 1e-12)) if self.is_log else entry for entry in (self.low, self.high, value))
        return self.start + (self.end - self.start) * min(1.0, max(0.0, (at - low) / (high - low)))

    def ticks(self, count: int, *, smallest_step: float = 0.0) -> list[float]:
        """About `count` round values within the domain."""
        if self.is_log:
            return _log_ticks(self.low, self.high)
        step = max(smallest_step, _nice_step((self.high - self.low) / max(1, count)))
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def scale_of(
    values: Iterable[float], *, start: float, end: float, from_zero: bool = False, is_log: bool = False, is_tight: bool = False
) -> Scale:
    """A scale that shows all values; its borders are round numbers unless `is_tight`."""
    known = list(values)
    low, high = min(known), max(known)
    if is_log:
        positive = [value for value in known if value > 0] or [1e-3]
        low, high = 10 ** math.floor(math.log10(min(positive))), 10 ** math.ceil(math.log10(max(positive)) + 1e-9)
        return Scale(low=low, high=high if high > low else low * 10, start=start, end=end, is_log=True)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-3):
        pad = abs(high) * 0.1 or 1.0
        low, high = low - (0.0 if is_tight or (from_zero and low >= 0) else pad), high + pad
    if not is_tight:
        step = _nice_step((high - low) / 4)
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Scale(low=low, high=high, start=start, end=end)


def tick_words(value: float, *, step: float) -> str:
    """A tick's label with the decimals that tell it from its neighbour."""
    if abs(value) < 1e-9 * step:
        return "0"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if step >= size:
            return f"{_fixed(value / size, step / size)}{letter}"
    if step < 1e-4:
        digits = max(0, math.floor(math.log10(abs(value))) - math.floor(math.log10(step)))
        mantissa, exponent = f"{value:.{digits + (step / 10 ** math.floor(math.log10(step)) % 1 > 0.1)}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return _fixed(value, step)


def decimate(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most about `limit` points: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    size = -(-len(points) * 2 // limit)
    kept: list[Point] = [points[0]]
    for at in range(0, len(points), size):
        stretch = points[at : at + size]
        kept += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return [*kept, points[-1]]


class Plot:
    """Axes, and what is drawn between them. Give all values first, as `x_values` and `y_values`: they fix the scales."""

    def __init__(
        self,
        *,
        label: str,
        x_values: Iterable[float],
        y_values: Iterable[float],
        x_label: str,
        y_label: str,
        width: int = 520,
        height: int = 230,
        y_from_zero: bool = False,
        y_is_log: bool = False,
        right: int = 12,
        x_is_whole: bool = False,
    ) -> None:
        """`right` is the margin on that side in pixels, wider where rules are labelled; `x_is_whole` keeps ticks at whole numbers."""
        self.label, self.x_label, self.y_label = label, x_label, y_label
        self.width, self.height = width, height
        self.x = scale_of(x_values, start=50, end=width - right, is_tight=True)
        self.y = scale_of(y_values, start=height - 40, end=30, from_zero=y_from_zero, is_log=y_is_log)
        self._body: list[str] = []
        self._label_ys: list[float] = []
        self._x_is_whole = x_is_whole

    def line(self, points: Sequence[Point], *, css: str) -> None:
        """Join points; few points are marked, so that one alone, or a gap between two, can be seen."""
        if len(points) <= FEW_POINTS:
            self.dots(points, css=css, radius=2.2)
        path = " ".join(f"{pixels(self.x(x))},{pixels(self.y(y))}" for x, y in decimate(points))
        self._body.append(tag("polyline", points=path, css=f"line {css}"))

    def dots(self, points: Sequence[Point], *, css: str, titles: Sequence[str] = (), radius: float = 3.0) -> None:
        """Mark points; a title shows when the pointer rests on one."""
        for number, (x, y) in enumerate(points):
            title = tag("title", words(titles[number])) if titles else ""
            self._body.append(tag("circle", title, cx=self.x(x), cy=self.y(y), r=radius, css=f"dot {css}"))

    def rule(self, y: float, *, text: str, css: str) -> None:
        """A horizontal line over the whole width, labelled in the right margin. Lowest first: a label too near another moves up."""
        at = self.y(y)
        label_y = min([at + 4, *(taken - 14 for taken in self._label_ys)])
        self._label_ys.append(label_y)
        self._body.append(tag("line", x1=self.x.start, x2=self.x.end, y1=at, y2=at, css=f"rule {css}"))
        self._body.append(tag("text", words(text), x=self.x.end + 6, y=label_y, css=f"label {css}"))

    def svg(self) -> str:
        """The figure."""
        return canvas("".join((*self._y_axis(), *self._x_axis(), *self._body)), width=self.width, height=self.height, label=self.label)

    def _y_axis(self) -> list[str]:
        ticks = self.y.ticks(4)
        step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0]) if ticks else 1.0
        drawn = [tag("text", words(self.y_label), x=4, y=13, css="label")]
        for value in ticks:
            at = self.y(value)
            drawn.append(tag("line", x1=self.x.start, x2=self.x.end, y1=at, y2=at, css="grid"))
            written = f"{value:g}" if self.y.is_log else tick_words(value, step=step)
            drawn.append(tag("text", words(written), x=self.x.start - 7, y=at + 4, css="tick end"))
        return drawn

    def _x_axis(self) -> list[str]:
        ticks = self.x.ticks(max(2, self.width // 65), smallest_step=1.0 if self._x_is_whole else 0.0)
        step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
        base = self.y.start
        drawn = [tag("line", x1=self.x.start, x2=self.x.end, y1=base, y2=base, css="axis")]
        for value in ticks:
            at = self.x(value)
            drawn.append(tag("line", x1=at, x2=at, y1=base, y2=base + 4, css="axis"))
            drawn.append(tag("text", words(tick_words(value, step=step)), x=at, y=base + 16, css="tick middle"))
        drawn.append(tag("text", words(self.x_label), x=self.x.end, y=self.height - 5, css="label end"))
        return drawn


def bar_chart(
    bars: Sequence[tuple[str, float, str]], *, label: str, x_label: str, y_label: str, css: str, width: int = 520, height: int = 230
) -> str:
    """Upright bars: (name below, height, words above). The heights start at zero."""
    x_start, x_end, base, top = 50, width - 12, height - 40, 44
    y = scale_of([value for _, value, _ in bars], start=base, end=top, from_zero=True)
    pitch = (x_end - x_start) / len(bars)
    thick = min(64.0, pitch * 0.72)
    ticks = y.ticks(4)
    body = [tag("text", words(y_label), x=4, y=13, css="label"), tag("text", words(x_label), x=x_end, y=height - 5, css="label end")]
    for value in ticks:
        at = y(value)
        body.append(tag("line", x1=x_start, x2=x_end, y1=at, y2=at, css="grid"))
        body.append(tag("text", words(tick_words(value, step=ticks[1] - ticks[0])), x=x_start - 7, y=at + 4, css="tick end"))
    for number, (name, value, above) in enumerate(bars):
        middle = x_start + (number + 0.5) * pitch
        title = tag("title", words(f"{name}: {above}"))
        body.append(tag("rect", title, x=middle - thick / 2, y=y(value), width=thick, height=max(0.5, base - y(value)), css=f"area {css}"))
        body.append(tag("text", words(above), x=middle, y=y(value) - 5, css="tick middle") if pitch > 34 else "")
        body.append(tag("text", words(name), x=middle, y=base + 16, css="tick middle") if pitch > 14 or number % 5 == 0 else "")
    body.append(tag("line", x1=x_start, x2=x_end, y1=base, y2=base, css="axis"))
    return canvas("".join(body), width=width, height=height, label=label)


def canvas(body: str, *, width: int, height: int, label: str, css: str = "") -> str:
    """The outer element; `label` is what a screen reader says."""
    return tag("svg", body, viewBox=f"0 0 {width} {height}", role="img", aria_label=label, css=css or "plot")


def _nice_step(raw: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    return next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if magnitude * factor >= raw * (1 - 1e-9))


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = round(math.log10(low)), round(math.log10(high))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    return [value for exponent in range(first, last + 1) for factor in factors if (value := factor * 10.0**exponent) <= high * 1.0001]


def _fixed(value: float, step: float) -> str:
    decimals = next((digits for digits in range(7) if abs(round(step, digits) - step) < step * 1e-3), 6)
    return f"{value:.{decimals}f}"
