"""Figures of a plan as a person reads them, by their units."""

from __future__ import annotations

from pipelinerl.observe.report.units import duration, quantity

_LARGE = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


def say(value: float, unit: str) -> str:
    """A figure with its unit: `45.7 GB`, `12.3 s`, `7.62 B parameters`."""
    if unit == "B":
        size, name = next(
            ((size, name) for size, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if abs(value) >= size), (1, "B")
        )
        return f"{quantity(value / size)} {name}"
    if unit == "s":
        return duration(value)
    if unit == "B/s":
        return f"{say(value, 'B')}/s"
    return f"{number(value)} {unit}".strip()


def number(value: float) -> str:
    """A number without its unit: thousands separated, large ones with a letter for a million, a billion (B) or a trillion."""
    size, letter = next(
        ((size, letter) for size, letter in _LARGE if abs(value) >= 10 * size or (size > 1e6 and abs(value) >= size)), (1, "")
    )
    return f"{quantity(value / size)} {letter}".strip()
