"""Every figure of docs/results.md that a bench produced is one that it stored, rounded to the digits that are printed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
STORED = ROOT / "scripts" / "bench" / "results"
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?"


def rows() -> Iterator[tuple[str, str, str]]:
    """What, figure and bench of each row that a bench stands for; "same" is the bench of the row above."""
    bench = None
    for what, figure, command in re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", (ROOT / "docs" / "results.md").read_text(), re.MULTILINE):
        if command != "same":
            found = re.search(r"scripts/bench/(\w+)\.py(?: --part (\w+))?", command)
            bench = found and "-".join(filter(None, found.groups()))
        if bench is not None:
            yield what, figure, bench


def values(stored: Any) -> Iterator[float]:
    """The numbers of a result. A text that holds one for each seed, "34.1 / 33.5", also gives their mean."""
    if isinstance(stored, dict | list):
        for each in stored.values() if isinstance(stored, dict) else stored:
            yield from values(each)
    elif isinstance(stored, str):
        numbers = [float(number.replace(",", "")) for number in re.findall(NUMBER, stored)]
        yield from numbers
        if " / " in stored and numbers:
            yield sum(numbers) / len(numbers)
    elif isinstance(stored, int | float):
        yield float(stored)


def is_rounded(printed: str, value: float) -> bool:
    """Whether a value, or its percentage, is printed so. Zeros at the end of a whole number may be rounding."""
    mantissa, _, exponent = printed.replace(",", "").partition("e")
    digits = len(mantissa.partition(".")[2]) if "." in mantissa else -(len(mantissa) - len(mantissa.rstrip("0")))
    half = 0.5 * 10.0 ** (int(exponent or 0) - digits)
    return any(math.isfinite(one) and abs(one - float(printed.replace(",", ""))) <= half * 1.001 for one in (value, 100 * value))


def test_rounding_is_told_from_another_figure() -> None:
    assert is_rounded("0.92", 0.918)
    assert is_rounded("2,290", 2287.4)
    assert is_rounded("7.6e-6", 7.64e-6)
    assert is_rounded("20", 0.2)
    assert not is_rounded("0.92", 0.93)
    assert not is_rounded("2,290", 2280.0)


@pytest.mark.parametrize(("what", "figure", "bench"), list(rows()), ids=lambda text: text[:40])
def test_a_figure_is_stored(what: str, figure: str, bench: str) -> None:
    named = [STORED / f"{bench.replace('_', mark)}{kind}.json" for mark in "_-" for kind in ("", "-quick")]
    stored = [value for path in set(named) if path.exists() for value in values(json.loads(path.read_text()))]
    printed = re.findall(NUMBER, re.sub(r"\(.*?\)", "", figure))  # in brackets stand figures of other days
    assert printed
    assert [number for number in printed if not any(is_rounded(number, value) for value in stored)] == [], what
