"""Stretches of time, and how much of others they cover, found by bisection: a run of days has a million of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

Stretch = tuple[float, float]
"""(start, end) in seconds."""


class Stretches:
    """A set of stretches, which may overlap each other."""

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        table = np.array(sorted(stretches), np.float64).reshape(-1, 2)
        self._origin = float(table[0, 0]) if len(table) else 0.0  # Unix seconds would cost sums their digits
        self._starts, ends = (table - self._origin).T
        self._by_start, self._latest = ends, np.maximum.accumulate(ends)
        self._ends = np.sort(ends)
        self._start_sums, self._end_sums = (np.concatenate(([0.0], np.cumsum(times))) for times in (self._starts, self._ends))

    def __len__(self) -> int:
        return len(self._starts)

    def covered_s(self, others: Sequence[Stretch]) -> float:
        """Return the seconds of other stretches that these cover; where two of these overlap, twice."""
        table = np.array(others, np.float64).reshape(-1, 2)
        before, until = (self._up_to(times) for times in (table - self._origin).T)
        return float((until - before).sum())

    def within(self, start: float, end: float) -> list[Stretch]:
        """Return the parts of these between two moments, in order."""
        low = int(np.searchsorted(self._latest, start - self._origin, side="right"))
        high = int(np.searchsorted(self._starts, end - self._origin, side="left"))
        near = (np.column_stack([self._starts[low:high], self._by_start[low:high]]) + self._origin).tolist()
        return [(max(start, since), min(end, until)) for since, until in near if since < end and until > start]

    def merged(self) -> Stretches:
        """Return what any of these covers, as stretches that do not overlap."""
        if not len(self):
            return self
        apart = self._starts[1:] > self._latest[:-1]
        starts, ends = self._starts[np.concatenate(([True], apart))], self._latest[np.concatenate((apart, [True]))]
        return Stretches(zip((starts + self._origin).tolist(), (ends + self._origin).tolist(), strict=True))

    def _up_to(self, times: np.ndarray) -> np.ndarray:
        """Return the seconds that these cover before each moment: since every start, less since every end."""
        starts, ends = np.searchsorted(self._starts, times), np.searchsorted(self._ends, times)
        return (starts * times - self._start_sums[starts]) - (ends * times - self._end_sums[ends])
