"""A series that stays short, however long the run."""

from __future__ import annotations

from typing import Generic, TypeVar

_T = TypeVar("_T")


class Thinned(Generic[_T]):
    """A list that stays short: when full, every second row goes and from then on only every second one is taken. The last one stays."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: list[_T] = []
        self._stride = 1
        self._num_seen = 0
        self._last: _T | None = None

    def add(self, row: _T) -> None:
        """Take the next row."""
        if self._num_seen % self._stride == 0:
            self._rows.append(row)
            if len(self._rows) > self._limit:
                del self._rows[1::2]
                self._stride *= 2
        self._num_seen += 1
        self._last = row

    def rows(self) -> list[_T]:
        """The rows kept, in order, the last one included."""
        if self._last is None or self._rows[-1] is self._last:
            return list(self._rows)
        return [*self._rows, self._last]
