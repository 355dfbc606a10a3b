"""The ledger's file: an SQLite database in WAL mode, written in the order in which things happened, many rows at a time.

Whoever books something only appends to a queue; `flush` writes the queue, in order, as one transaction, from any thread. So the file always
holds a prefix of the run's history: whatever ends the process, at whatever instant, no entry is there without those before it. A flush
survives the end of the process; one that is asked to be durable also survives the end of the machine.

`events` is the history: nothing in it is ever changed or removed, nor in `settled`, the groups in the order in which they were placed in
a step or given up. `groups`, `samples` and `trajectories` are what a resumed run needs beside it, and shrink again: bodies go once nothing
can ask for them any more and `run.record_groups` newer groups were settled, whose bodies are for `orchestrator.replay`. A trajectory stands
apart from what becomes of it, since a row that changes is written whole.
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelinerl.errors import LedgerError, WireError
from pipelinerl.messages import Message
from pipelinerl.transport.codec import encode

ENDS = "('trained', 'filtered', 'stale', 'failed', 'cancelled')"
PAGE_BYTES = 1 << 14
"""A trajectory of a thousand tokens in one or two pages, not five: half the time of writing it."""
SCHEMA_VERSION = 2
"""Kept in the file as `user_version`; 1, which said 0 there, had trajectories among the samples."""
_APPEND = f"INSERT INTO events VALUES ({', '.join('?' * 16)})"

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS ledger (id TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS events (
    seq        INTEGER PRIMARY KEY,
    t          REAL NOT NULL,
    kind       TEXT NOT NULL,
    rollout_id TEXT,
    group_id   INTEGER,
    prompt_id  TEXT,
    attempt    INTEGER,
    step       INTEGER,
    row        INTEGER,
    place      INTEGER,
    peer       TEXT,
    reason     TEXT,
    reward     REAL,
    oldest     INTEGER,
    newest     INTEGER,
    num_tokens INTEGER
) STRICT;
CREATE INDEX IF NOT EXISTS events_of_rollout ON events (rollout_id, kind) WHERE rollout_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS events_of_run ON events (kind, step) WHERE rollout_id IS NULL;
CREATE TABLE IF NOT EXISTS groups (
    group_id  INTEGER PRIMARY KEY,
    prompt_id TEXT NOT NULL,
    prompt    BLOB,
    epoch     INTEGER NOT NULL,
    row       INTEGER NOT NULL,
    step      INTEGER
) STRICT;
CREATE INDEX IF NOT EXISTS groups_of_prompt ON groups (prompt_id);
CREATE INDEX IF NOT EXISTS groups_of_step ON groups (step) WHERE prompt IS NOT NULL;
CREATE TABLE IF NOT EXISTS settled (
    number    INTEGER PRIMARY KEY,
    group_id  INTEGER NOT NULL UNIQUE,
    step      INTEGER NOT NULL,
    is_placed INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS samples (
    rollout_id TEXT PRIMARY KEY,
    group_id   INTEGER NOT NULL,
    advantages BLOB,
    step       INTEGER,
    row        INTEGER,
    place      INTEGER
) STRICT;
CREATE INDEX IF NOT EXISTS samples_of_step ON samples (step, row, place) WHERE step IS NOT NULL;
CREATE TABLE IF NOT EXISTS trajectories (
    rollout_id TEXT PRIMARY KEY REFERENCES samples ON DELETE CASCADE,
    scored     BLOB NOT NULL
) STRICT;
CREATE VIEW IF NOT EXISTS fates AS
    SELECT e.rollout_id, a.group_id, a.prompt_id, e.kind AS fate, coalesce(e.reason, '') AS reason, e.step, e.reward,
           e.oldest AS oldest_version, e.newest AS newest_version, e.num_tokens, a.t AS admitted_s, e.t AS ended_s
    FROM events e JOIN events a ON a.rollout_id = e.rollout_id AND a.kind = 'admitted'
    WHERE e.rollout_id IS NOT NULL AND e.kind IN {ENDS} AND NOT EXISTS (
        SELECT 1 FROM events r WHERE r.rollout_id = e.rollout_id AND r.kind = 'revived' AND r.seq > e.seq
    )
    ORDER BY e.seq;
"""


class Store:
    """The database and what waits to be written to it. `path` None keeps it in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._events: list[tuple[Any, ...]] = []
        self._waiting: list[tuple[str, tuple[Any, ...]]] = []
        self._lock = threading.Lock()
        """Guards the database: writers take turns, each with all that was put before, so the order stands."""
        self._failure: LedgerError | None = None
        """Why nothing is written any more: what follows an entry that could not be must not be there without it."""
        self._taking = threading.RLock()
        """Held while the queue is taken, and while entries are put that belong together."""
        self._database = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
        with self.readable():
            self._database.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA foreign_keys = ON")
            self._check_schema()
            self._database.executescript(_SCHEMA)
            self.ledger_id = self._identify()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Have everything put in the block be written by one flush, or none of it."""
        with self._taking:
            yield

    def append(self, event: tuple[Any, ...]) -> None:
        """Have a row of `events`, every column in its order, written by the next flush."""
        with self._taking:
            self._events.append(event)

    def put(self, statement: str, *values: Any) -> None:
        """Have a row of another table written by the next flush, after all events; a value that is a message is encoded there."""
        with self._taking:
            self._waiting.append((statement, values))

    def flush(self, *, durably: bool = False) -> None:
        """Write everything put so far, in order, as one transaction; any thread may. Raises `LedgerError`."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            with self._taking:
                events, self._events = self._events, []
                taken, self._waiting = self._waiting, []
            if not events and not taken and not durably:
                return
            try:
                self._database.execute(f"PRAGMA synchronous = {'FULL' if durably else 'NORMAL'}")
                self._database.execute("BEGIN IMMEDIATE")
                self._database.executemany(_APPEND, events)
                for statement, rows in itertools.groupby(taken, key=lambda item: item[0]):
                    self._database.executemany(statement, [tuple(map(_plain, values)) for _, values in rows])
                self._database.execute("COMMIT")
            except sqlite3.Error as error:
                self._failure = LedgerError(
                    f"cannot write {len(events) + len(taken)} entries to {self._path}: {error}. What stands in it is whole; make"
                    " room on the disk, and resume the run"
                )
                raise self._failure from error

    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Rows of a query, everything put before included."""
        self.flush()
        with self._lock, self.readable():
            return self._database.execute(query, values).fetchall()

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Have what cannot be read of the file, or be made sense of, raise `LedgerError`."""
        try:
            yield
        except (sqlite3.Error, WireError, ValueError, TypeError, LookupError) as error:
            raise LedgerError(
                f"{self._path} cannot be read as a run's ledger: {type(error).__name__}: {error}. It was damaged after it was written, or"
                " is another version's: restore it, with the checkpoints of the same moment"
            ) from error

    def close(self) -> None:
        """Write what waits and close the file."""
        try:
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file without writing what waits, as the end of the process would."""
        with self._lock:
            self._database.close()

    def _check_schema(self) -> None:
        is_new = not self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if is_new:
            self._database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        found = self._database.execute("PRAGMA user_version").fetchone()[0]
        if found != SCHEMA_VERSION:
            raise LedgerError(
                f"{self._path} was begun by another version of pipelinerl: its schema is {found}, expected {SCHEMA_VERSION}. Finish the run"
                " with that version, or begin another from its last checkpoint's model"
            )

    def _identify(self) -> str:
        found = self._database.execute("SELECT id FROM ledger").fetchone()
        if found is None:
            found = (uuid.uuid4().hex,)
            self._database.execute("INSERT INTO ledger VALUES (?)", found)
        return found[0]


def _plain(value: Any) -> Any:
    return encode(value) if isinstance(value, Message) else value
