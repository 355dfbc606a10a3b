"""Samples laid end to end in rows of at most `max_tokens`, emitted as they fill: best fit over a few open rows.

Best fit with k open rows is online bin packing; a larger k fills rows better and holds samples back longer. A row leaves when it is
full, when no open row has room for the next sample (the fullest leaves), or when the step closes.
"""

from __future__ import annotations

from pipelinerl.messages import Sample

OPEN_ROWS = 4
"""Rows being filled at once: 4 keeps fullness near that of sorting on long-tailed lengths; 1 would send rows earlier, but emptier."""


class Packing:
    """Fills rows with samples; returns each row once, when it leaves."""

    def __init__(self, *, max_tokens: int, open_rows: int = OPEN_ROWS) -> None:
        self._max_tokens = max_tokens
        self._open_rows = open_rows
        self._rows: list[list[Sample]] = []
        self._room: list[int] = []
        self._shortest = max_tokens

    def add(self, sample: Sample) -> list[list[Sample]]:
        """Place a sample; return the rows that leave now. Raises `ValueError` for a sample longer than a row: our own mistake."""
        size = sample.trajectory.num_tokens
        if size > self._max_tokens:
            raise ValueError(f"sample {sample.trajectory.rollout_id} of {size} tokens does not fit a row of {self._max_tokens}")
        self._shortest = min(self._shortest, size)
        leaving: list[list[Sample]] = []
        fits = [index for index, room in enumerate(self._room) if room >= size]
        if fits:
            index = min(fits, key=lambda candidate: self._room[candidate])
        else:
            if len(self._rows) == self._open_rows:
                leaving.append(self._take(min(range(len(self._rows)), key=lambda candidate: self._room[candidate])))
            self._rows.append([])
            self._room.append(self._max_tokens)
            index = len(self._rows) - 1
        self._rows[index].append(sample)
        self._room[index] -= size
        if self._room[index] < self._shortest:
            leaving.append(self._take(index))
        return leaving

    def flush(self) -> list[list[Sample]]:
        """Return every row still open: the step closes."""
        rows, self._rows, self._room = self._rows, [], []
        return rows

    def _take(self, index: int) -> list[Sample]:
        self._room.pop(index)
        return self._rows.pop(index)
