"""What a server owes its clients, in an SQLite file: sessions, samplers, and every request about a model, until a checkpoint covers it.

A request stands here before its client hears that it was accepted, and its answer before that is given. So whatever is killed, at
whatever instant, each request is in one of three places: not accepted, and the client sends it again; accepted, and handed to a trainer
that begins at the model's checkpoint; or covered by that. A request is known by its model and the client's number for it, for as long as
the model lives, so that one which is sent again is never carried out again.

A checkpoint is recorded once everything before it was answered; from then on the bodies that it covers are gone. Rows that are replayed
carry a checksum, which is compared (`pipelinerl.storage.checksum`).
"""

from __future__ import annotations

import contextlib
import enum
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.errors import LedgerError
from pipelinerl.storage import checksum

FORM = 1
"""Number of the form of the file; raised where an older program could not read it."""

Answer = bytes | Mapping[str, Any]
"""Protobuf, or an object of JSON."""

_SCHEMA = f"""
BEGIN;
CREATE TABLE sessions (session_id TEXT PRIMARY KEY) STRICT;
CREATE TABLE samplers (
    sampler_id TEXT PRIMARY KEY,
    session_id TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE,
    model_id   TEXT NOT NULL,
    folder     TEXT NOT NULL,
    num_steps  INTEGER NOT NULL,
    model_path TEXT
) STRICT;
CREATE TABLE saved (path TEXT PRIMARY KEY, num_steps INTEGER NOT NULL) STRICT;
CREATE TABLE publications (version INTEGER PRIMARY KEY, model_id TEXT NOT NULL, num_steps INTEGER NOT NULL) STRICT;
CREATE TABLE models (
    model_id   TEXT PRIMARY KEY,
    session_id TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE,
    covered    INTEGER NOT NULL DEFAULT 0,
    num_steps  INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE requests (
    number     INTEGER PRIMARY KEY AUTOINCREMENT,
    request_id TEXT NOT NULL UNIQUE,
    model_id   TEXT NOT NULL REFERENCES models ON DELETE CASCADE,
    kind       TEXT NOT NULL,
    about      TEXT NOT NULL,
    body       BLOB,
    checksum   INTEGER NOT NULL,
    answer     BLOB,
    is_json    INTEGER NOT NULL DEFAULT 1,
    answered_s REAL
) STRICT;
CREATE INDEX held ON requests (number) WHERE body IS NOT NULL;
CREATE INDEX kept ON requests (answered_s) WHERE answer IS NOT NULL;
CREATE INDEX of_model ON requests (model_id, number);
CREATE TABLE sequences (number INTEGER PRIMARY KEY, sequence_id TEXT NOT NULL UNIQUE, tokens BLOB NOT NULL, versions BLOB NOT NULL) STRICT;
CREATE TABLE trained (sequence_id TEXT NOT NULL, model_id TEXT NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL) STRICT;
CREATE INDEX trained_sequence ON trained (sequence_id);
PRAGMA user_version = {FORM};
COMMIT;
"""


class Kind(enum.StrEnum):
    """What a request asks of a model."""

    CREATE = "create_model"
    """Begin it."""
    LOAD = "load_weights"
    """Give it what was saved."""
    PASS = "forward_backward"
    """Add a gradient, or look at a loss."""
    STEP = "optim_step"
    """Apply the gradient."""
    SAVE = "save_weights"
    """Save it to be trained on."""
    SAVE_FOR_SAMPLER = "save_weights_for_sampler"
    """Save it to be sampled from, or publish it as it goes."""


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """A request that stands in the ledger."""

    number: int
    """Its place among all; those of a model are carried out in this order."""
    request_id: str
    model_id: str
    kind: Kind
    about: dict[str, Any]
    """What was decided of it when it was accepted, and is the same whenever it is carried out."""
    body: bytes
    is_answered: bool
    """True where it is carried out again."""


class Ledger:
    """The file, or, of None, one in memory. Used by one thread."""

    def __init__(self, path: Path | None) -> None:
        """Raises `LedgerError` for a file that cannot be read, or is another version's."""
        self._path = path
        with self._readable():
            self._database = sqlite3.connect(path or ":memory:", isolation_level=None)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA foreign_keys = ON")
            if not self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                self._database.executescript(_SCHEMA)
            (form,) = self._database.execute("PRAGMA user_version").fetchone()
            if form != FORM:
                raise LedgerError(f"{path} has form {form}, and this program reads form {FORM}: start a server of its own folder")
            (held,) = self._database.execute("SELECT coalesce(sum(length(body)), 0) FROM requests WHERE body IS NOT NULL").fetchone()
            (kept,) = self._database.execute("SELECT coalesce(sum(length(answer)), 0) FROM requests WHERE answer IS NOT NULL").fetchone()
        self.num_held_bytes: int = held
        """Bytes of bodies that no checkpoint covers."""
        self.num_kept_bytes: int = kept
        """Bytes of answers."""

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    # --- requests ---

    def accept(self, request_id: str, *, model_id: str, kind: Kind, about: Mapping[str, Any], body: bytes) -> Accepted:
        """Write a request down, so that it survives the end of the machine."""
        said = msgspec.json.encode(about).decode()
        row = (request_id, model_id, str(kind), said, body)
        with self._written(durably=True):
            cursor = self._database.execute(
                "INSERT INTO requests (request_id, model_id, kind, about, body, checksum) VALUES (?, ?, ?, ?, ?, ?)",
                (*row, checksum.of_row(row)),
            )
        self.num_held_bytes += len(body)
        assert cursor.lastrowid is not None, "a row was written"
        return Accepted(
            number=cursor.lastrowid, request_id=request_id, model_id=model_id, kind=kind, about=dict(about), body=body, is_answered=False
        )

    def next_held(self, *, after: int) -> Accepted | None:
        """Return the first request behind `after` that no checkpoint covers. Raises `LedgerError` where it is not as it was written."""
        query = "SELECT number, request_id, model_id, kind, about, body, checksum, answered_s IS NOT NULL FROM requests"
        with self._readable():
            found = self._database.execute(f"{query} WHERE number > ? AND body IS NOT NULL ORDER BY number LIMIT 1", (after,)).fetchone()
        if found is None:
            return None
        number, *row, said, is_answered = found
        if checksum.of_row(row) != said:
            raise LedgerError(f"{self._path} was damaged after it was written: request {row[0]} is not as its checksum says")
        request_id, model_id, kind, about, body = row
        return Accepted(
            number=number,
            request_id=request_id,
            model_id=model_id,
            kind=Kind(kind),
            about=msgspec.json.decode(about),
            body=body,
            is_answered=bool(is_answered),
        )

    def answered(self, number: int, answer: Answer, *, now_s: float, is_over: bool = False) -> None:
        """Keep an answer. `is_over`: the request was not carried out, and is not to be."""
        is_json = not isinstance(answer, bytes)
        data = msgspec.json.encode(answer) if is_json else answer
        with self._written():
            if is_over:
                self._drop("number = ?", number)
            changed = self._database.execute(
                "UPDATE requests SET answer = ?, is_json = ?, answered_s = ? WHERE number = ? AND answered_s IS NULL",
                (data, is_json, now_s, number),
            )
        self.num_kept_bytes += len(data) * changed.rowcount

    def is_known(self, request_id: str) -> bool:
        """Return whether a request was accepted."""
        return self._database.execute("SELECT 1 FROM requests WHERE request_id = ?", (request_id,)).fetchone() is not None

    def answer_of(self, request_id: str) -> Answer | None:
        """Return the answer that is kept of a request; None where there is none, or not any more."""
        query = "SELECT answer, is_json FROM requests WHERE request_id = ? AND answer IS NOT NULL"
        if (found := self._database.execute(query, (request_id,)).fetchone()) is None:
            return None
        return msgspec.json.decode(found[0]) if found[1] else found[0]

    def forget_answers(self, *, before_s: float, max_bytes: int) -> None:
        """Forget answers that were given before this moment, and the oldest while all of them take more than `max_bytes`."""
        oldest = "SELECT number, length(answer), answered_s FROM requests WHERE answer IS NOT NULL ORDER BY answered_s, number LIMIT 1"
        while (found := self._database.execute(oldest).fetchone()) is not None:
            number, size, answered_s = found
            if answered_s >= before_s and self.num_kept_bytes <= max_bytes:
                return
            self.num_kept_bytes -= size
            with self._written():
                self._database.execute("UPDATE requests SET answer = NULL WHERE number = ?", (number,))

    def unanswered(self) -> list[tuple[str, str, int]]:
        """Return the requests without an answer, in their order: name, model, and the bytes of the body."""
        query = "SELECT request_id, model_id, length(body) FROM requests WHERE answered_s IS NULL ORDER BY number"
        return self._database.execute(query).fetchall()

    # --- models ---

    def open_model(self, model_id: str, *, session_id: str) -> None:
        """Note a model; one that is noted stays as it is."""
        with self._written():
            self._database.execute("INSERT OR IGNORE INTO models (model_id, session_id) VALUES (?, ?)", (model_id, session_id))

    def close_model(self, model_id: str) -> None:
        """Forget a model and all that was asked of it."""
        with self._written():
            (kept,) = self._database.execute(
                "SELECT coalesce(sum(length(answer)), 0) FROM requests WHERE model_id = ?", (model_id,)
            ).fetchone()
            self._drop("model_id = ?", model_id)
            self._database.execute("DELETE FROM models WHERE model_id = ?", (model_id,))
            self._database.execute("DELETE FROM trained WHERE model_id = ?", (model_id,))
        self.num_kept_bytes -= kept

    def cover(self, model_id: str, *, number: int, num_steps: int) -> None:
        """Record a checkpoint that holds all that was asked of a model up to `number`, so many steps among it."""
        with self._written(durably=True):
            self._database.execute("UPDATE models SET covered = ?, num_steps = ? WHERE model_id = ?", (number, num_steps, model_id))
            self._drop("model_id = ? AND number <= ? AND answered_s IS NOT NULL", model_id, number)

    def checkpoints(self) -> dict[str, tuple[int, int]]:
        """Return by model what its checkpoint covers, 0 where there is none, and the steps before that."""
        query = "SELECT model_id, covered, num_steps FROM models ORDER BY rowid"
        return {model_id: (covered, num_steps) for model_id, covered, num_steps in self._database.execute(query)}

    def holding(self, *, up_to: int) -> list[str]:
        """Return the models with requests up to a number that no checkpoint covers, and that are answered."""
        query = "SELECT DISTINCT model_id FROM requests WHERE body IS NOT NULL AND answered_s IS NOT NULL AND number <= ?"
        return [model_id for (model_id,) in self._database.execute(query, (up_to,))]

    def models(self) -> list[tuple[str, str, int, list[dict[str, Any]]]]:
        """Return each model with its session, the steps asked of it, and what is known of each pass since the last of them."""
        steps = "SELECT count(*), coalesce(max(number), 0) FROM requests WHERE model_id = ? AND kind = ?"
        passes = "SELECT about FROM requests WHERE model_id = ? AND kind = ? AND number > ? ORDER BY number"
        found = []
        for model_id, session_id in self._database.execute("SELECT model_id, session_id FROM models ORDER BY rowid").fetchall():
            num_steps, last = self._database.execute(steps, (model_id, Kind.STEP)).fetchone()
            abouts = [msgspec.json.decode(about) for (about,) in self._database.execute(passes, (model_id, Kind.PASS, last))]
            found.append((model_id, session_id, num_steps, abouts))
        return found

    # --- sessions, samplers, what is saved and published ---

    def begin_session(self, session_id: str) -> None:
        with self._written(durably=True):
            self._database.execute("INSERT INTO sessions VALUES (?)", (session_id,))

    def end_session(self, session_id: str) -> None:
        """Forget a session, whose models are closed, and its samplers."""
        with self._written():
            self._database.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,))

    def sessions(self) -> list[str]:
        return [session_id for (session_id,) in self._database.execute("SELECT session_id FROM sessions ORDER BY rowid")]

    def add_sampler(self, *values: str | int | None) -> None:
        """Note a sampler: its id, session, and weights' model, folder and steps, and its path; one that is noted stays as it is."""
        with self._written():
            self._database.execute("INSERT OR IGNORE INTO samplers VALUES (?, ?, ?, ?, ?, ?)", values)

    def samplers(self) -> list[tuple[Any, ...]]:
        return self._database.execute("SELECT * FROM samplers ORDER BY rowid").fetchall()

    def was_saved(self, path: str, *, num_steps: int) -> None:
        """Note the steps behind a saved model."""
        with self._written():
            self._database.execute("INSERT OR REPLACE INTO saved VALUES (?, ?)", (path, num_steps))

    def saved(self) -> dict[str, int]:
        return dict(self._database.execute("SELECT path, num_steps FROM saved").fetchall())

    def was_published(self, version: int, *, model_id: str, num_steps: int) -> None:
        with self._written():
            self._database.execute("INSERT OR REPLACE INTO publications VALUES (?, ?, ?)", (version, model_id, num_steps))

    def publications(self) -> list[tuple[int, str, int]]:
        return self._database.execute("SELECT version, model_id, num_steps FROM publications ORDER BY version").fetchall()

    # --- provenance ---

    def add_sequence(self, sequence_id: str, *, tokens: bytes, versions: bytes) -> None:
        """Remember a sampled sequence; one of the same name is replaced."""
        with self._written():
            row = (sequence_id, tokens, versions)
            self._database.execute("INSERT OR REPLACE INTO sequences (sequence_id, tokens, versions) VALUES (?, ?, ?)", row)

    def remove_sequence(self, sequence_id: str) -> None:
        with self._written():
            for table in ("sequences", "trained"):
                self._database.execute(f"DELETE FROM {table} WHERE sequence_id = ?", (sequence_id,))

    def was_trained(self, marks: list[tuple[str, str, int, int]]) -> None:
        """Note stretches of sequences that a model is trained on: (sequence, model, start, length)."""
        with self._written():
            self._database.executemany("INSERT INTO trained VALUES (?, ?, ?, ?)", marks)

    def sequences(self) -> Iterator[tuple[str, bytes, bytes]]:
        return self._database.execute("SELECT sequence_id, tokens, versions FROM sequences ORDER BY number")

    def trained(self) -> Iterator[tuple[str, str, int, int]]:
        return self._database.execute("SELECT * FROM trained")

    # --- the file ---

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Have what is written in the block be there as one, or not at all."""
        if self._database.in_transaction:
            yield
            return
        with self._written(durably=True):
            yield

    @contextlib.contextmanager
    def _written(self, *, durably: bool = False) -> Iterator[None]:
        """One transaction, or a part of the one that is open. Raises `LedgerError` where it cannot be written."""
        if self._database.in_transaction:
            yield
            return
        try:
            self._database.execute(f"PRAGMA synchronous = {'FULL' if durably else 'NORMAL'}")
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            raise LedgerError(
                f"cannot write to {self._path}: {error}. What stands in it is whole; make room on the disk, and start the server again"
            ) from error

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise LedgerError(f"{self._path} cannot be read as a server's ledger: {error}") from error

    def _drop(self, where: str, *values: Any) -> None:
        """Let go of bodies."""
        bodies = f"FROM requests WHERE {where} AND body IS NOT NULL"
        (size,) = self._database.execute(f"SELECT coalesce(sum(length(body)), 0) {bodies}", values).fetchone()
        self._database.execute(f"UPDATE requests SET body = NULL WHERE {where} AND body IS NOT NULL", values)
        self.num_held_bytes -= size
