"""One metric of the table, and the names that its values get."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Values = float | Mapping[str, float | None] | None
"""A number, or, of a metric with a `<part>` in its name, one for each part; None where nothing was recorded."""


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    """The name in trackers. `<part>` stands for a name of the run's own, as a queue's, or for mean, min and max over a fleet."""
    field: str
    """The place in the journal: a field of the line; for the trainer's, a key of the field `trainer` of a step."""
    unit: str
    formula: str
    action: str
    """The reader's next move."""
    title: str = ""
    """The title of its figure in the report; empty where it has none of its own."""
    read: Callable[[Any], Values] = lambda _: None
    """Takes the value from the state of the run, or from the row."""

    @property
    def label(self) -> str:
        """Title and unit, for a row of a table."""
        return self.title if self.unit in ("", self.title) else f"{self.title}, {self.unit}"

    def named(self, values: Values) -> dict[str, float]:
        """The values under their full names; what was not recorded is left out."""
        parts = values.items() if isinstance(values, Mapping) else [("", values)]
        return {_PART.sub(lambda _, part=part: part, self.name): value for part, value in parts if value is not None}


_PART = re.compile(r"<[^>]+>")


def first_parts(*metrics: Metric) -> tuple[str, ...]:
    """The first parts of their names, each once; `progress` is the axes' own."""
    return tuple(dict.fromkeys(part for metric in metrics if (part := metric.name.partition("/")[0]) != "progress"))


def over_fleet(values: Iterable[float | None]) -> dict[str, float]:
    """Mean, least and most over a fleet: a mean alone hides the one engine that is ill. Empty where nobody told a value."""
    known = [value for value in values if value is not None]
    return {"mean": sum(known) / len(known), "min": min(known), "max": max(known)} if known else {}
