"""Numbers as people read them: thousands separated, three significant digits, units named."""

from __future__ import annotations

import math
from collections.abc import Callable

from pipelinerl.observe.fold.rows import EXITS

NOT_RECORDED = "not recorded"
_GAP = "\N{NO-BREAK SPACE}"
"""The space between a number and its unit, at which no line ends."""


def whole(value: float | None) -> str:
    """A count: `12,345`."""
    return NOT_RECORDED if value is None else f"{round(value):,}"


def quantity(value: float | None, *, digits: int = 3) -> str:
    """A measured number with `digits` significant digits, thousands whole: `0.0123`, `12.3`, `1,234`."""
    if value is None:
        return NOT_RECORDED
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude >= digits - 1:
        return f"{round(value):,}"
    if magnitude < -4:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{digits - 1 - magnitude}f}"


def percent(fraction: float | None) -> str:
    """Parts of one as `56.2 %`."""
    return NOT_RECORDED if fraction is None else f"{100 * fraction:.1f}{_GAP}%"


def seconds(value: float | None) -> str:
    """Seconds with one decimal, for arithmetic that a reader checks: `1,234.5 s`."""
    return NOT_RECORDED if value is None else f"{value:,.1f}{_GAP}s"


def milliseconds(value: float | None) -> str:
    """Seconds as milliseconds: `0.12 ms`."""
    return NOT_RECORDED if value is None else f"{quantity(1000 * value)}{_GAP}ms"


def duration(value: float | None) -> str:
    """A length of time in the unit that fits: `0.12 ms`, `3.4 s`, `5 min 12 s`, `2 h 05 min`, `3 d 4 h`."""
    if value is None:
        return NOT_RECORDED
    if value < 1:
        return milliseconds(value)
    if value < 60:
        return f"{value:.1f}{_GAP}s"
    whole_s = round(value)
    if whole_s < 3600:
        return f"{whole_s // 60} min {whole_s % 60:02d} s"
    if whole_s < 86400:
        return f"{whole_s // 3600} h {whole_s % 3600 // 60:02d} min"
    return f"{whole_s // 86400} d {whole_s % 86400 // 3600} h"


def plural(num: float, noun: str) -> str:
    """`1 engine`, `2 engines`."""
    return f"{whole(num)} {noun}" + ("" if num == 1 else "s")


def dashed(value: float | None, write: Callable[[float | None], str] = quantity) -> str:
    """A number, or a dash where there is none, for lines that have no room for words."""
    return "–" if value is None else write(value)


def whole_percent(fraction: float | None) -> str:
    """Parts of one as `56 %`."""
    return dashed(fraction, lambda part: f"{100 * (part or 0.0):.0f} %")


def account(identity: dict[str, float], *, off: int) -> str:
    """The conservation identity of rollouts, which is `off` by so many: `64 admitted = 2 in flight + 62 trained + …`."""
    parts = " + ".join(f"{whole(identity.get(name, 0))} {name.replace('_', ' ')}" for name in ("in_flight", *EXITS))
    return f"{whole(identity['admitted'])} admitted {'≠' if off else '='} {parts}"
