"""Columns that JSON can say in some way are made so; the others are refused by name."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import math
import pathlib
import uuid
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.data.columns import NotJson, json_value

Point = collections.namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HARD = 3


@dataclasses.dataclass
class Task:
    name: str
    parts: tuple[int, ...]


def itself() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1, (2, [3])), [1, [2, [3]]]),
        ({"b", "a"}, ["a", "b"]),
        (frozenset({3, "a", 1}), [1, 3, "a"]),
        (Point(1, 2), {"x": 1, "y": 2}),
        (Task("sum", (1, 2)), {"name": "sum", "parts": [1, 2]}),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC), "2026-01-02T03:00:00+00:00"),
        (datetime.time(3, 4), "03:04:00"),
        (datetime.timedelta(minutes=1, milliseconds=5), 60.005),
        (decimal.Decimal("0.1"), 0.1),
        (decimal.Decimal("0.12345678901234567890123"), "0.12345678901234567890123"),
        (fractions.Fraction(1, 3), "1/3"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (pathlib.PurePosixPath("a/b"), "a/b"),
        (Colour.RED, "red"),
        (Level.HARD, 3),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.datetime64("2026-01-02"), "2026-01-02"),
        (np.array([[1, 2]]), [[1, 2]]),
        ({3: "b", None: 1, True: 2, datetime.date(2026, 1, 1): 3}, {"3": "b", "null": 1, "true": 2, "2026-01-01": 3}),
        (collections.OrderedDict(a=collections.deque), None),
    ],
)
def test_what_json_can_say_in_some_way_is_made_so(value: Any, expected: Any) -> None:
    if expected is None:
        with pytest.raises(NotJson, match="a type"):
            json_value(value)
        return
    found = json_value(value)
    assert (found, type(found)) == (expected, type(expected))
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"bytes", "a bytes"),
        (math.nan, "nan"),
        (np.float32("inf"), "inf"),
        (decimal.Decimal("NaN"), "NaN"),
        (2**70, f"the number {2**70}, which has more than 64 bits"),
        (1j, "a complex"),
        (object(), "a object"),
        ([1, {"deep": (b"",)}], "a bytes"),
        ({1: "a", "1": "b"}, "keys that are the same text"),
        ({(1, 2): "a"}, r"the key \(1, 2\)"),
        (np.datetime64("2026-01-01T00:00:00.000000001"), "a numpy datetime64 of more precision than Python has"),
        (itself(), "nested deeper than 32 levels, or a list that holds itself"),
    ],
)
def test_what_json_cannot_say_is_named(value: Any, said: str) -> None:
    with pytest.raises(NotJson, match=said):
        json_value(value)


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@pytest.mark.slow
@given(_PLAIN)
def test_plain_json_stays_as_it_is(value: Any) -> None:
    assert json_value(value) == value
    assert json.dumps(json_value(value)) == json.dumps(value), "also the kinds of numbers"
