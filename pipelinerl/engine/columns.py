"""What running sequences sampled so far, in arrays: a forward pass of any number of sequences is taken in a handful of calls.

Lists of Python objects would cost a few operations for every token, which at 1,024 sequences take longer than vLLM's own scheduling, and
76 bytes where 12 do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

NO_ROW = -1
_NEVER = np.iinfo(np.int64).max
_FIRST_ROWS, _FIRST_PLACES = 16, 64
"""Room at the beginning. Both double as they are needed, so larger ones would spare the first few copies and no more."""


class Columns:
    """The tokens of running sequences. Each has a row from `open` to `close`; a row has a place for each token.

    Room follows the most sequences and the longest one so far: 12 bytes for each place of each row, of which the system gives only pages
    that are written.
    """

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        """Row by rollout id, in the order in which they were opened."""
        self._names: list[str] = []
        """Rollout id by row; what it was last, where the row is free."""
        self._free: list[int] = []
        self._token_ids = np.zeros((0, _FIRST_PLACES), np.int32)
        self._logprobs = np.zeros((0, _FIRST_PLACES), np.float32)
        self._versions = np.zeros((0, _FIRST_PLACES), np.int32)
        self._num_prompt_tokens = np.zeros(0, np.int64)
        self._num_tokens = np.zeros(0, np.int64)
        self._num_told = np.zeros(0, np.int64)
        self._tell_every = np.zeros(0, np.int64)
        self._kv_version = np.zeros(0, np.int64)
        """Oldest version that computed a part of the KV cache."""
        self._kv_versions_sum = np.zeros(0, np.int64)
        """Of the versions of the KV cache's tokens, each the one that sampled it; the prompt's count under that of the prefill."""

    def open(self, rollout_id: str, *, num_prompt_tokens: int, version: int, chunk_tokens: int) -> None:
        """Begin a sequence, whose prompt is computed under a version. `chunk_tokens`: see `Generate`."""
        if not self._free:
            self._add_rows()
        self._rows[rollout_id] = row = self._free.pop()
        self._names[row] = rollout_id
        self._num_prompt_tokens[row] = num_prompt_tokens
        self._num_tokens[row] = self._num_told[row] = 0
        self._tell_every[row] = chunk_tokens or _NEVER
        self._kv_version[row] = version
        self._kv_versions_sum[row] = version * num_prompt_tokens

    def close(self, rollout_id: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """End a sequence: its tokens [T] int32, their log-probabilities [T] float32 and versions [T] int32."""
        row = self._rows.pop(rollout_id)
        self._tell_every[row] = _NEVER
        self._free.append(row)
        sampled = slice(0, self._num_tokens[row])
        return self._token_ids[row, sampled].copy(), self._logprobs[row, sampled].copy(), self._versions[row, sampled].copy()

    def rows_of(self, rollout_ids: Sequence[str]) -> np.ndarray:
        """[N] rows; `NO_ROW` for a sequence that is not open."""
        row_of = self._rows.get
        return np.array([row_of(rollout_id, NO_ROW) for rollout_id in rollout_ids], np.intp)

    def append(self, rows: np.ndarray, *, token_ids: np.ndarray, logprobs: np.ndarray, versions: int | np.ndarray) -> int:
        """Give each of these rows [N], none twice, one token more: all [N]. Return the tokens that came before these, prompts included."""
        places = self._num_tokens[rows]
        if places.max(initial=0) >= self._token_ids.shape[1]:
            self._add_places()
        self._token_ids[rows, places] = token_ids
        self._logprobs[rows, places] = logprobs
        self._versions[rows, places] = versions
        self._num_tokens[rows] = places + 1
        self._kv_versions_sum[rows] += versions
        return int((places + self._num_prompt_tokens[rows]).sum())

    def num_tokens(self) -> dict[str, int]:
        """Return how many tokens each open sequence has sampled."""
        return {rollout_id: int(self._num_tokens[row]) for rollout_id, row in self._rows.items()}

    def to_tell(self, rows: np.ndarray) -> list[str]:
        """Those among these rows that go on and have sampled as many tokens since they were told of as was asked for."""
        due = self._num_tokens[rows] - self._num_told[rows] >= self._tell_every[rows]
        return [self._names[row] for row in rows[due]]

    def untold(self, rollout_id: str) -> tuple[int, np.ndarray]:
        """The place of the first token that was not told of, and all from there on [T] int32; now they are."""
        row = self._rows[rollout_id]
        start, end = int(self._num_told[row]), int(self._num_tokens[row])
        self._num_told[row] = end
        return start, self._token_ids[row, start:end].copy()

    def newer_than(self, version: int) -> list[str]:
        """Sequences whose last token is of a newer version."""
        rows = np.fromiter(self._rows.values(), np.intp)
        last = self._versions[rows, self._num_tokens[rows] - 1]
        return [self._names[row] for row in rows[(self._num_tokens[rows] > 0) & (last > version)]]

    def staler_than(self, version: int, *, max_staleness: int | None, max_mean_staleness: float | None) -> list[str]:
        """Sequences whose KV cache would be further behind a version than it may: in its oldest part, or in the mean over its tokens."""
        rows = np.fromiter(self._rows.values(), np.intp)
        is_stale = np.zeros(len(rows), bool)
        if max_staleness is not None:
            is_stale |= abs(version - self._kv_version[rows]) > max_staleness
        if max_mean_staleness is not None:
            means = self._kv_versions_sum[rows] / (self._num_prompt_tokens[rows] + self._num_tokens[rows])
            is_stale |= abs(version - means) > max_mean_staleness
        return [self._names[row] for row in rows[is_stale]]

    def recompute(self, rollout_ids: Collection[str], version: int) -> tuple[list[int], int]:
        """Note that KV caches are computed anew under a version: the tokens that each had sampled, and all tokens that are computed."""
        rows = self.rows_of(list(rollout_ids))
        num_tokens = self._num_prompt_tokens[rows] + self._num_tokens[rows]
        self._kv_version[rows], self._kv_versions_sum[rows] = version, version * num_tokens
        return self._num_tokens[rows].tolist(), int(num_tokens.sum())

    def _add_rows(self) -> None:
        before = len(self._names)
        num_rows = max(_FIRST_ROWS, 2 * before)
        for name, array in self._arrays():
            setattr(self, name, _grown(array, (num_rows, *array.shape[1:])))
        self._names += [""] * (num_rows - before)
        self._free += range(num_rows - 1, before - 1, -1)

    def _add_places(self) -> None:
        for name, array in self._arrays():
            if array.ndim == 2:
                setattr(self, name, _grown(array, (len(array), 2 * array.shape[1])))

    def _arrays(self) -> list[tuple[str, np.ndarray]]:
        return [(name, value) for name, value in vars(self).items() if isinstance(value, np.ndarray)]


def _grown(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    larger = np.zeros(shape, array.dtype)
    larger[tuple(map(slice, array.shape))] = array
    return larger
