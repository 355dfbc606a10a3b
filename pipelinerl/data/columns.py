"""Columns of a row as plain JSON values, which travel to reward functions in other processes and stay in the ledger.

| a column holds | it becomes |
| --- | --- |
| text, a number, true, false, null, lists and objects of these | itself |
| a tuple, a set or frozenset, a numpy array | a list; a set's in sorted order where it has one |
| a date, a time, a datetime | its ISO 8601 text |
| a duration | its seconds |
| a `Decimal` that 64-bit floating point holds exactly | that number; another one its digits, as text |
| an `enum.Enum`, a numpy scalar | its value |
| a UUID, a path, a fraction | its text |
| a dataclass, a named tuple | an object of its fields |
| a key of an object that is a number, a bool, null or a date | its text, as `json.dumps` has it |

Whatever else a column holds (bytes, NaN, an object of a class) is refused: it would reach a reward as something else, or not at all.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import math
import pathlib
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipelinerl.messages import MAX_DEPTH


class NotJson(ValueError):
    """A value that JSON cannot say; the message names it for a person."""


def json_value(value: Any) -> Any:
    """Return a value in plain JSON. Raises `NotJson` naming what in it cannot be."""
    return _converted(value, depth=0)


def _converted(value: Any, *, depth: int) -> Any:
    kind = type(value)
    if depth >= MAX_DEPTH:
        raise NotJson(f"values nested deeper than {MAX_DEPTH} levels, or a {kind.__name__} that holds itself")
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return _integer(value)
    if kind is float:
        return _finite(value)
    if kind is list:
        return [_converted(one, depth=depth + 1) for one in value]
    if isinstance(value, Mapping):
        return _object(value, depth=depth)
    return _of_another_type(value, depth=depth)


def _of_another_type(value: Any, *, depth: int) -> Any:
    """Return the JSON of a value that is not JSON's own, by the table above."""
    if isinstance(value, enum.Enum):
        return _converted(value.value, depth=depth + 1)
    if isinstance(value, np.generic):
        return _converted(_plain(value.item(), value), depth=depth + 1)
    if isinstance(value, np.ndarray):
        return _converted(value.tolist(), depth=depth + 1)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _object(value._asdict(), depth=depth)  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, list | tuple):
        return [_converted(one, depth=depth + 1) for one in value]
    if isinstance(value, set | frozenset):
        return sorted((_converted(one, depth=depth + 1) for one in value), key=lambda one: (type(one).__name__, json.dumps(one)))
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return _decimal(value)
    if isinstance(value, uuid.UUID | pathlib.PurePath | fractions.Fraction):
        return str(value)
    if isinstance(value, str | int | float):  # a class of its own that is one of these
        return _converted(next(base(value) for base in (str, bool, int, float) if isinstance(value, base)), depth=depth + 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _object({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, depth=depth)
    raise NotJson(f"a {type(value).__name__}")


def _plain(item: Any, scalar: Any) -> Any:
    """Return the value that a numpy scalar holds; some (dates of nanoseconds) hold nothing that Python has."""
    if type(item) is type(scalar) or (isinstance(scalar, np.datetime64 | np.timedelta64) and isinstance(item, int)):
        raise NotJson(f"a numpy {type(scalar).__name__} of more precision than Python has")
    return item


def _object(value: Mapping[Any, Any], *, depth: int) -> dict[str, Any]:
    converted = {_key(key): _converted(inner, depth=depth + 1) for key, inner in value.items()}
    if len(converted) < len(value):
        raise NotJson("keys that are the same text")
    return converted


def _key(key: Any) -> str:
    if isinstance(key, str):
        return str(key)
    plain = _converted(key, depth=0) if not isinstance(key, list | tuple | set | frozenset | Mapping) else None
    if isinstance(plain, str):
        return plain
    if plain is not None or key is None:
        return json.dumps(plain)
    raise NotJson(f"the key {key!r}")


def _integer(value: int) -> int:
    if -(2**63) <= value < 2**64:
        return value
    raise NotJson(f"the number {value}, which has more than 64 bits")


def _finite(value: float) -> float:
    if math.isfinite(value):
        return value
    raise NotJson(f"{value}")


def _decimal(value: decimal.Decimal) -> float | str:
    if not value.is_finite():
        raise NotJson(f"{value}")
    number = float(value)
    return number if math.isfinite(number) and decimal.Decimal(repr(number)) == value else str(value)
