"""Samples laid end to end in rows of at most `max_tokens`, emitted as they fill: best fit over a few open rows.

Best fit with k open rows is online bin packing; a larger k fills rows better and holds samples back longer. A row leaves when it is
full, when no open row has room for the next sample (the fullest leaves), or when the step closes.

Replicas train waves of one row each, and a wave lasts as long as its costliest row. Rows that are full cost about the same; the last ones
of a step are not, so their samples are dealt anew, by cost, over as many rows as make the last wave whole.

Reinforcement learning and supervised fine-tuning pack by the same rule. No asyncio, no clock, no socket.
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from pipelinerl.config import Config

OPEN_ROWS = 8
"""Rows being filled at once: 8 keeps fullness at 0.97 and more on long-tailed lengths, where 4 gives 0.96 and 1 gives 0.78; 64 adds nothing
to 8 but for means above a quarter of a row, and holds samples back longer."""
ATTENTION_TOKENS = 32_768
"""Length of a sample at which attention costs as much as everything else: 8 times the hidden size of a model of 8 B parameters. Smaller
deals long samples apart more eagerly."""


class Sized(Protocol):
    """An item that fills rows."""

    @property
    def num_tokens(self) -> int:
        """Tokens it takes of a row."""
        ...


S = TypeVar("S", bound=Sized)


class Packing(Generic[S]):
    """Fills rows with samples; returns each row once, when it leaves."""

    def __init__(self, *, max_tokens: int, open_rows: int = OPEN_ROWS, num_replicas: int = 1, max_sample_tokens: int | None = None) -> None:
        """A sample of more than `max_tokens`, and of at most `max_sample_tokens`, is a row by itself."""
        self._max_tokens = max_tokens
        self._max_sample_tokens = max_sample_tokens or max_tokens
        self.num_replicas = num_replicas
        """It may change between two steps."""
        self._num_left = 0
        """Rows of this step that have left."""
        self._open_rows = open_rows
        self._rows: list[list[S]] = []
        self._room: list[int] = []
        self._shortest = max_tokens

    def add(self, sample: S) -> list[list[S]]:
        """Place a sample; return the rows that leave now. Raises `ValueError` for a sample longer than may be: our own mistake."""
        size = sample.num_tokens
        if size > self._max_sample_tokens:
            raise ValueError(f"a sample of {size} tokens does not fit a row of {self._max_sample_tokens}")
        self._shortest = min(self._shortest, size)
        leaving: list[list[S]] = []
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
        self._num_left += len(leaving)
        return leaving

    def flush(self) -> list[list[S]]:
        """Return every row still open, evened out over the last wave: the step closes."""
        rows, self._rows, self._room = self._rows, [], []
        num_missing = -(self._num_left + len(rows)) % self.num_replicas
        self._num_left = 0
        if self.num_replicas == 1:
            return rows
        return self._dealt([sample for row in rows for sample in row], num_rows=len(rows) + num_missing) or rows

    def _dealt(self, samples: list[S], *, num_rows: int) -> list[list[S]] | None:
        """Deal samples to `num_rows`, the costliest first, each to the cheapest row so far; None where one then finds no room."""
        rows: list[list[S]] = [[] for _ in range(min(num_rows, len(samples)))]
        room, costs = [self._max_tokens] * len(rows), [0.0] * len(rows)
        for sample in sorted(samples, key=lambda sample: -sample.num_tokens):
            size = sample.num_tokens
            index = min((index for index in range(len(rows)) if room[index] >= size), key=costs.__getitem__, default=None)
            if index is None:
                return None
            rows[index].append(sample)
            room[index] -= size
            costs[index] += cost_of(size)
        return rows

    def _take(self, index: int) -> list[S]:
        self._room.pop(index)
        return self._rows.pop(index)


def packing_of(config: Config, *, num_replicas: int) -> Packing[Any]:
    """Return what fills the rows of a run for so many replicas; agents' episodes may be larger than a row."""
    limit = None if config.gateway is None else config.gateway.max_episode_tokens
    return Packing(max_tokens=config.batch.max_tokens, num_replicas=num_replicas, max_sample_tokens=limit)


def cost_of(num_tokens: int) -> float:
    """Return the cost of training a sample, in tokens of a short one: linear, and quadratic for attention."""
    return num_tokens * (1 + num_tokens / ATTENTION_TOKENS)
