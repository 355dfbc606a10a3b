"""The fate of every admitted rollout, and the conservation identity:

    admitted = in flight + trained + filtered + stale + failed + cancelled

Each rollout is admitted once and ends once; a second end is our own mistake and raises. The counts live in memory; the rows go to
`<run>/ledger.sqlite` in batches: taken by the thread that books, written by another.
"""

from __future__ import annotations

import collections
import dataclasses
import sqlite3
import threading
from pathlib import Path

from pipelinerl.messages import Fate

_SCHEMA = """
CREATE TABLE IF NOT EXISTS fates (
    rollout_id TEXT PRIMARY KEY,
    group_id   INTEGER NOT NULL,
    prompt_id  TEXT NOT NULL,
    fate       TEXT NOT NULL,
    reason     TEXT NOT NULL,
    step       INTEGER,
    reward     REAL,
    oldest_version INTEGER,
    newest_version INTEGER,
    num_tokens INTEGER NOT NULL,
    admitted_s REAL NOT NULL,
    ended_s    REAL NOT NULL
) STRICT;
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A rollout in flight."""

    rollout_id: str
    group_id: int
    prompt_id: str
    admitted_s: float
    """Seconds on the run's clock."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a rollout when it ends; None where it never got that far."""

    step: int | None = None
    """Step it was trained in."""
    reward: float | None = None
    oldest_version: int | None = None
    newest_version: int | None = None
    num_tokens: int = 0
    """Tokens sampled for it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The six counts of the conservation identity."""

    admitted: int
    in_flight: int
    trained: int
    filtered: int
    stale: int
    failed: int
    cancelled: int

    @property
    def holds(self) -> bool:
        return self.admitted == self.in_flight + self.trained + self.filtered + self.stale + self.failed + self.cancelled

    def __str__(self) -> str:
        right = f"{self.in_flight} in flight + {self.trained} trained + {self.filtered} filtered + {self.stale} stale"
        sign = "=" if self.holds else "IS NOT"
        return f"{self.admitted} admitted {sign} {right} + {self.failed} failed + {self.cancelled} cancelled"


class Ledger:
    """Counts and records. `path` None keeps the database in memory."""

    def __init__(self, path: Path | None) -> None:
        self.reasons: collections.Counter[str] = collections.Counter()
        """Rollouts that were not trained, by `fate: reason`."""
        self._counts: collections.Counter[Fate] = collections.Counter()
        self._num_admitted = 0
        self._open: dict[str, Admitted] = {}
        self._rows: list[tuple[object, ...]] = []
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path or ":memory:", check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.executescript(_SCHEMA)

    def admit(self, rollout: Admitted) -> None:
        """A rollout was sent to an engine for the first time."""
        assert rollout.rollout_id not in self._open, f"rollout {rollout.rollout_id} was admitted twice"
        self._open[rollout.rollout_id] = rollout
        self._num_admitted += 1

    def end(self, rollout_id: str, fate: Fate, *, now_s: float, reason: str = "", facts: Facts | None = None) -> None:
        """A rollout ended. Raises `KeyError` where it is not in flight: it was never admitted, or ended before."""
        rollout = self._open.pop(rollout_id)
        self._counts[fate] += 1
        if fate is not Fate.TRAINED:
            self.reasons[f"{fate}: {reason}"] += 1
        known = facts or Facts()
        self._rows.append(
            (
                rollout_id,
                rollout.group_id,
                rollout.prompt_id,
                str(fate),
                reason,
                known.step,
                known.reward,
                known.oldest_version,
                known.newest_version,
                known.num_tokens,
                rollout.admitted_s,
                now_s,
            )
        )

    def cancel_rest(self, *, now_s: float, reason: str) -> None:
        """End everything still in flight as cancelled: the run ends."""
        for rollout_id in list(self._open):
            self.end(rollout_id, Fate.CANCELLED, now_s=now_s, reason=reason)

    def identity(self) -> Identity:
        """The counts of this moment."""
        return Identity(
            admitted=self._num_admitted,
            in_flight=len(self._open),
            trained=self._counts[Fate.TRAINED],
            filtered=self._counts[Fate.FILTERED],
            stale=self._counts[Fate.STALE],
            failed=self._counts[Fate.FAILED],
            cancelled=self._counts[Fate.CANCELLED],
        )

    def take_rows(self) -> list[tuple[object, ...]]:
        """Hand out the rows gathered so far, for `write`; belongs to the thread that calls `end`."""
        rows, self._rows = self._rows, []
        return rows

    def write(self, rows: list[tuple[object, ...]]) -> None:
        """Write rows in one transaction; any thread may."""
        with self._lock, self._database:
            self._database.executemany(f"INSERT INTO fates VALUES ({','.join('?' * 12)})", rows)

    def flush(self) -> None:
        """Write every row gathered so far, now."""
        self.write(self.take_rows())

    def rows(self) -> list[tuple[object, ...]]:
        """Every recorded fate, in the order in which the rollouts ended; for tests and reports."""
        self.flush()
        return self._database.execute("SELECT * FROM fates ORDER BY rowid").fetchall()

    def close(self) -> None:
        """Write what is left and close the file."""
        self.flush()
        self._database.close()
