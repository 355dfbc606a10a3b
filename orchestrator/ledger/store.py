"""The ledger's file: an SQLite database in WAL mode, written in the order in which things happened, many rows at a time.

Recording only appends to a queue; `flush` writes the queue, in order, as one transaction, from any thread. So the file always
holds a prefix of the run's history: whatever ends the process, at whatever instant, no entry is there without those before it. A flush
survives the end of the process; one that is asked to be durable also survives the end of the machine.

Two kinds of tables stand in it. **History**, which is only ever added to: `events`, `drawn`, the prompts in the order in which they were
drawn, and `completed`, the groups in the order in which they were assigned to a step or dropped. Nothing that a run does reads it, but for
a curriculum that begins in the middle; `pipelinerl check`, `ledger` and `replay` do. **State**, which is all that a resumed run reads: what
is in flight, what was scored, the steps that a checkpoint may have to do without, which prompts rest, and counts. A row of it goes once
nothing can ask for it any more and `run.record_groups` newer groups were completed, whose bodies are for `orchestrator.replay`: so what a
resumed run reads is as much after 10^7 rollouts as after 10^3.

Every row of either kind ends with a checksum of itself (`pipelinerl.storage.checksum`), which is compared whenever the row is read; a row
of the state that a damaged page has lost is missed when the file is opened. A trajectory stands apart from what becomes of it, since a
row that changes is written whole.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from orchestrator.ledger import events
from pipelinerl.errors import LedgerError, WireError
from pipelinerl.messages import Message
from pipelinerl.storage import checksum
from pipelinerl.storage.schema import SCHEMA, refusal
from pipelinerl.transport.codec import encode

ENDS = "('trained', 'filtered', 'stale', 'failed', 'cancelled')"
PAGE_BYTES = 1 << 14
"""A trajectory of a thousand tokens in one or two pages, not five: half the time of writing it."""
_EVENT = f"INSERT INTO events VALUES ({', '.join('?' * (len(events.NAMES) + 4))})"

_SEARCHED = ("state", "counts", "in_flight", "groups", "samples", "steps", "checkpoints", "evaluations")
"""Tables in which a row might be missing without anybody asking for it by name."""

_EVENT_COLUMNS = "\n".join(f"    {name:<14} {events.SQL_TYPES[name]}," for name in events.NAMES)
_SCHEMA = f"""
CREATE TABLE ledger (id TEXT NOT NULL) STRICT;
CREATE TABLE events (
    seq            INTEGER PRIMARY KEY,
    t              REAL NOT NULL,
    kind           TEXT NOT NULL,
{_EVENT_COLUMNS}
    checksum       INTEGER NOT NULL
) STRICT;
CREATE INDEX events_of_run ON events (kind, step) WHERE rollout_id IS NULL;
CREATE INDEX revivals ON events (rollout_id) WHERE kind = 'revived';
CREATE TABLE drawn (
    group_id   INTEGER PRIMARY KEY,
    prompt_id  TEXT NOT NULL,
    epoch      INTEGER NOT NULL,
    row        INTEGER NOT NULL,
    checksum   INTEGER NOT NULL
) STRICT;
CREATE TABLE completed (
    number     INTEGER PRIMARY KEY,
    group_id   INTEGER NOT NULL,
    step       INTEGER NOT NULL,
    is_assigned INTEGER NOT NULL,
    checksum   INTEGER NOT NULL
) STRICT;
CREATE TABLE state (
    key        TEXT PRIMARY KEY,
    value      TEXT NOT NULL,
    checksum   INTEGER NOT NULL
) STRICT;
CREATE TABLE counts (
    status     TEXT NOT NULL,
    reason     TEXT NOT NULL,
    number     INTEGER NOT NULL,
    checksum   INTEGER NOT NULL,
    PRIMARY KEY (status, reason)
) STRICT;
CREATE TABLE in_flight (
    rollout_id TEXT PRIMARY KEY,
    group_id   INTEGER NOT NULL,
    prompt_id  TEXT NOT NULL,
    attempt    INTEGER NOT NULL,
    version    INTEGER NOT NULL,
    early_stop TEXT,
    revives    INTEGER NOT NULL,
    checksum   INTEGER NOT NULL
) STRICT;
CREATE TABLE groups (
    group_id   INTEGER PRIMARY KEY,
    prompt     BLOB NOT NULL,
    number     INTEGER,
    step       INTEGER,
    is_assigned INTEGER,
    checksum   INTEGER NOT NULL
) STRICT;
CREATE TABLE samples (
    rollout_id TEXT PRIMARY KEY,
    group_id   INTEGER NOT NULL,
    advantages BLOB,
    step       INTEGER,
    row        INTEGER,
    position   INTEGER,
    stopped_step INTEGER,
    is_prm_scored INTEGER NOT NULL,
    is_group_scored INTEGER NOT NULL,
    checksum   INTEGER NOT NULL
) STRICT;
CREATE INDEX samples_of_step ON samples (step, row, position) WHERE step IS NOT NULL;
CREATE TABLE trajectories (
    rollout_id TEXT PRIMARY KEY REFERENCES samples ON DELETE CASCADE,
    scored     BLOB NOT NULL,
    checksum   INTEGER NOT NULL
) STRICT;
CREATE TABLE steps (
    step        INTEGER PRIMARY KEY,
    num_rows    INTEGER NOT NULL,
    num_tokens  INTEGER NOT NULL,
    num_samples INTEGER NOT NULL,
    seq         INTEGER NOT NULL,
    checksum    INTEGER NOT NULL
) STRICT;
CREATE TABLE checkpoints (
    version    INTEGER PRIMARY KEY,
    commit_id  TEXT NOT NULL,
    checksum   INTEGER NOT NULL
) STRICT;
CREATE TABLE evaluations (
    version    INTEGER PRIMARY KEY,
    reward     REAL,
    checksum   INTEGER NOT NULL
) STRICT;
CREATE VIEW ended_rollouts AS
    SELECT e.rollout_id, a.group_id, a.prompt_id, e.kind AS status, coalesce(e.reason, '') AS reason, e.step, e.reward,
           e.oldest_version, e.newest_version, e.num_tokens, a.t AS admitted_s, e.t AS ended_s
    FROM events e JOIN events a ON a.rollout_id = e.rollout_id AND a.kind = 'admitted'
    WHERE e.rollout_id IS NOT NULL AND e.kind IN {ENDS} AND NOT EXISTS (
        SELECT 1 FROM events r WHERE r.rollout_id = e.rollout_id AND r.kind = 'revived' AND r.seq > e.seq
    )
    ORDER BY e.seq;
"""


def _columns() -> dict[str, tuple[str, ...]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(_SCHEMA)
        tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT IN ('ledger', 'events') ORDER BY rowid"
        names = [table for (table,) in fresh.execute(tables)]
        return {table: tuple(name for _, name, *_ in fresh.execute(f"PRAGMA table_info({table})"))[:-1] for table in names}


COLUMNS = _columns()
"""Columns of every table but `events`, without the checksum, which is the last one and is of these; in the order of the schema."""

PRUNING = "DELETE /* what is over */ FROM "
"""Beginning of a statement that removes rows of a table by what stands in others."""


def writing(table: str) -> str:
    """Return the statement that puts a row of a table, whose values are its columns, in place of one with the same key."""
    numbered = ", ".join(f"?{number}" for number in range(1, len(COLUMNS[table]) + 1))
    return f"INSERT OR REPLACE INTO {table} VALUES ({numbered}, row_checksum({numbered}))"


def changing(table: str, *columns: str) -> str:
    """Return the statement that changes columns of the row of a table with a key, which comes after their values."""
    names = COLUMNS[table]
    new = {name: f"?{number}" for number, name in enumerate(columns, start=1)}
    row = ", ".join(({name: name for name in names} | new).values())
    changes = ", ".join(f"{name} = {mark}" for name, mark in new.items())
    return f"UPDATE {table} SET {changes}, checksum = row_checksum({row}) WHERE {names[0]} = ?{len(columns) + 1}"


class Store:
    """The database and what waits to be written to it. `path` None keeps it in memory."""

    def __init__(self, path: Path | None, *, fence: Callable[[], None] = lambda: None) -> None:
        """Take `fence`, which is called before a write and raises where a restarted run has taken over (`pipelinerl.runtime.lease`)."""
        self._path = path
        self._fence = fence
        self._events: list[tuple[Any, ...]] = []
        self._waiting: list[tuple[str, tuple[Any, ...]]] = []
        self._lock = threading.Lock()
        """Guards the database: writers take turns, each with all that was put before, so the order stands."""
        self._failure: LedgerError | None = None
        """Why nothing is written any more: what follows an entry that could not be must not be there without it."""
        self._taking = threading.RLock()
        """Held while the queue is taken, and while entries are put that belong together."""
        self.before_flush: Callable[[], None] = lambda: None
        """Called first by a flush, to put what changed many times since the last one and is written once."""
        self._database = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
        self._database.create_function("row_checksum", -1, lambda *values: checksum.of_row(values), deterministic=True)
        with contextlib.ExitStack() as opened:
            opened.callback(self._database.close)  # one that cannot be read is not held until it is forgotten
            with self.readable():
                self._database.execute(f"PRAGMA page_size = {PAGE_BYTES}")
                self._check_schema()
                self._database.execute("PRAGMA journal_mode = WAL")
                self._database.execute("PRAGMA foreign_keys = ON")
                self.ledger_id = self._database.execute("SELECT id FROM ledger").fetchone()[0]
                self.last_seq = self._find_last()
            opened.pop_all()

    def transaction(self) -> contextlib.AbstractContextManager[Any]:
        """Have everything put in the block be written by one flush, or none of it."""
        return self._taking

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
            self._fence()
            with self._taking:
                self.before_flush()
                entries, self._events = self._events, []
                taken, self._waiting = self._waiting, []
            if not entries and not taken and not durably:
                return
            try:
                self._database.execute(f"PRAGMA synchronous = {'FULL' if durably else 'NORMAL'}")
                self._database.execute("BEGIN IMMEDIATE")
                if entries:
                    self._database.executemany(_EVENT, [(*entry, checksum.of_row(entry)) for entry in entries])
                    self._database.execute(_STATE, ("seq", str(entries[-1][0])))
                for statement, rows in _batches(taken):
                    self._database.executemany(statement, [tuple(map(_plain, values)) for values in rows])
                self._database.execute("COMMIT")
            except sqlite3.Error as error:
                self._failure = LedgerError(
                    f"cannot write {len(entries) + len(taken)} entries to {self._path}: {error}. What stands in it is whole; make"
                    " room on the disk, and resume the run"
                )
                raise self._failure from error

    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query, everything put before included."""
        self.flush()
        with self._lock, self.readable():
            return self._database.execute(query, values).fetchall()

    def rows(self, table: str, where: str = "TRUE", *values: Any) -> list[tuple[Any, ...]]:
        """Return rows of a table of `COLUMNS`, everything put before included. Raises `LedgerError` where one is not as it was written."""
        names = COLUMNS[table]
        found = self.read(f"SELECT {', '.join(names)}, checksum FROM {table} WHERE {where}", *values)
        for *row, said in found:
            if said != checksum.of_row(row):
                raise LedgerError(
                    f"{self._path} was damaged after it was written: the row {row[0]!r} of {table} has the checksum"
                    f" {checksum.of_row(row)}, expected {said}. {RESTORE}"
                )
        return [row[:-1] for row in found]

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Have what cannot be read of the file, or be made sense of, raise `LedgerError`."""
        try:
            yield
        except (sqlite3.Error, WireError, ValueError, TypeError, LookupError) as error:
            raise LedgerError(
                f"{self._path} cannot be read as a run's ledger: {type(error).__name__}: {error}. It was damaged after it was written, or"
                f" is another version's. {RESTORE}"
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
        """Have the tables be there, as this version writes them, with no row of the state lost."""
        if not self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            create(self._database)
        found = self._database.execute("PRAGMA user_version").fetchone()[0]
        if (reason := refusal(found, what=str(self._path))) is not None:
            raise LedgerError(reason)
        with contextlib.closing(sqlite3.connect(":memory:")) as fresh:
            create(fresh)
            if _definitions(fresh) != _definitions(self._database):
                raise ValueError("its tables are not those of this version")
        for table in _SEARCHED:
            for (said,) in self._database.execute(f"PRAGMA integrity_check({table})"):
                if said != "ok":
                    raise ValueError(said)

    def _find_last(self) -> int:
        """Return the number of the last event, which stands in two places."""
        (last,) = self._database.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()
        said = self._database.execute("SELECT value FROM state WHERE key = 'seq'").fetchone()
        if last != int(said[0] if said else 0):
            raise ValueError(f"its last entry is number {last}, expected {said[0] if said else 0}")
        return last


def create(database: sqlite3.Connection, *, ledger_id: str | None = None) -> None:
    """Make the tables of a new ledger."""
    database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA};")
    database.execute("INSERT INTO ledger VALUES (?)", (ledger_id or uuid.uuid4().hex,))
    database.execute("COMMIT")


def _definitions(database: sqlite3.Connection) -> list[tuple[str, str, str]]:
    return database.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()


def _batches(taken: list[tuple[str, tuple[Any, ...]]]) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """Yield statements with their rows, a table's in their order; none moves over a pruning, which looks at several tables."""
    for is_pruning, part in itertools.groupby(taken, key=lambda item: item[0].startswith(PRUNING)):
        items = list(part)
        if not is_pruning:
            items.sort(key=lambda item: _place_of(item[0]))
        for statement, rows in itertools.groupby(items, key=lambda item: item[0]):
            yield statement, [values for _, values in rows]


@functools.cache
def _place_of(statement: str) -> int:
    """Return the place of a statement's table in `COLUMNS`: a table that refers to another comes after it."""
    words = statement.split()
    return list(COLUMNS).index(words[1] if words[0] == "UPDATE" else words[words.index("INTO" if "INTO" in words else "FROM") + 1])


def _plain(value: Any) -> Any:
    return encode(value) if isinstance(value, Message) else value


RESTORE = "Restore it, with the checkpoints of the same moment, or start a new run from the model of a checkpoint"
_STATE = writing("state")
