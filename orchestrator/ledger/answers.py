"""What a script called and what it was answered, in order: a script that goes on is led by it to where the one before was.

A file of its own beside the ledger, which only grows: every rollout of the run stands in it. What waits is written before the ledger hears
of a step (`flush`), so the ledger knows of no step whose call is not here; what comes after the call of the last step that the ledger knows
of is dropped when the run goes on.
"""

from __future__ import annotations

import dataclasses
import enum
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.errors import LedgerError
from pipelinerl.storage import checksum

ANSWERS_FILE = "answers.sqlite"
"""The record's name in a run's folder."""


class Kind(enum.StrEnum):
    """The kinds of events."""

    CALLED = "called"
    """`words` name the call with a digest of what it was given; `number` is the step that it makes, -1 where it makes none."""
    ADMITTED = "admitted"
    """`number` is the group that the next prompt of the call became, -1 where it is quarantined."""
    RESULT = "result"
    """A result of the call's stream was read: `words` is the rollout, `number` its group."""
    ANSWERED = "answered"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event; its body stays in the file."""

    place: int
    """In the order of the record, from 0."""
    call: int
    """The number of the call, from 0."""
    kind: Kind
    words: str = ""
    number: int = -1
    task: int = 0
    """The task of the script that called, in the order of their first calls."""


class Answers:
    """The record of a run's script."""

    def __init__(self, path: Path) -> None:
        """Open a record, or begin one. Raises `LedgerError` for one that cannot be read."""
        self._path = path
        self._waiting: list[tuple[int, int, str, str, int, int, bytes, int]] = []
        self._database = sqlite3.connect(path, isolation_level=None)
        try:
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS events (place INTEGER PRIMARY KEY, call INTEGER, kind TEXT, words TEXT, number INTEGER,"
                " task INTEGER, body BLOB, checksum INTEGER) STRICT"
            )
            rows = self._database.execute("SELECT place, call, kind, words, number, task FROM events ORDER BY place").fetchall()
        except sqlite3.Error as error:
            self._database.close()
            raise LedgerError(f"{path} cannot be read as the record of a script's calls: {error}") from error
        self.events = [
            Event(place=place, call=call, kind=Kind(kind), words=words, number=number, task=task)
            for place, call, kind, words, number, task in rows
        ]
        """Those that stood in it when it was opened."""
        self._next = rows[-1][0] + 1 if rows else 0

    def add(self, call: int, kind: Kind, *, words: str = "", number: int = -1, task: int = 0, body: bytes = b"") -> None:
        """Have an event written by the next flush."""
        row = (self._next, call, str(kind), words, number, task, body)
        self._waiting.append((*row, checksum.of_row(row)))
        self._next += 1

    def body(self, event: Event) -> bytes:
        """Return what an event holds. Raises `LedgerError` where it is not as it was written."""
        *row, said = self._database.execute("SELECT * FROM events WHERE place = ?", (event.place,)).fetchone()
        if checksum.of_row(row) != said:
            raise LedgerError(
                f"{self._path} was damaged after it was written: {event.kind} of call {event.call}. Go on without replay=True"
            )
        return row[-1]

    def drop(self, events: Sequence[Event]) -> None:
        """Forget events."""
        self._database.executemany("DELETE FROM events WHERE place = ?", [(event.place,) for event in events])

    def flush(self) -> None:
        """Write what waits, as one transaction. Raises `LedgerError`."""
        rows, self._waiting = self._waiting, []
        try:
            self._database.execute("BEGIN")
            self._database.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            raise LedgerError(f"cannot write {len(rows)} events to {self._path}: {error}. Make room on the disk, and go on") from error

    def close(self) -> None:
        """Close the file without what waits, which no step has followed."""
        self._database.close()
