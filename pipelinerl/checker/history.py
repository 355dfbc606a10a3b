"""A run's history as plain values: the ledger's entries in order, and what the checkpoints say of themselves.

Whether all of it is as it was written is told by the checksums beside every row and of every file, computed here once more. The one library
beside Python's own is xxhash; the rule of what is hashed is repeated here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

SCHEMA = 4
TABLES = ("drawn", "completed", "state", "counts", "in_flight", "groups", "samples", "trajectories", "steps", "checkpoints", "evaluations")
"""Beside `events`: in each the last column is a checksum of those before."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the ledger; what does not apply to its kind is None."""

    seq: int
    t: float
    kind: str
    rollout_id: str | None
    group_id: int | None
    prompt_id: str | None
    attempt: int | None
    step: int | None
    row: int | None
    position: int | None
    turn: int | None
    prm_step: int | None
    peer: str | None
    reason: str | None
    reward: float | None
    score: float | None
    version: int | None
    oldest_version: int | None
    newest_version: int | None
    num_tokens: int | None
    num_rows: int | None
    num_samples: int | None
    commit_id: str | None
    suspect: str | None
    data: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint folder."""

    name: str
    manifest: dict[str, Any]
    missing: tuple[str, ...]
    """Files its manifest lists that are not there, or not as they were written."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    ledger_id: str
    entries: Iterator[Entry]
    checkpoints: tuple[Checkpoint, ...]
    """Oldest first."""
    damage: list[str] = dataclasses.field(default_factory=list)
    """Rows of the ledger that are not as they were written; complete once `entries` were read."""


@contextlib.contextmanager
def open_history(run_folder: Path) -> Iterator[History]:
    """Open the ledger for reading; a run may be writing it meanwhile. Raises `FileNotFoundError`, `ValueError` for a damaged manifest."""
    path = run_folder / "ledger.sqlite"
    if not path.is_file():
        raise FileNotFoundError(f"no ledger at {path}: name the folder of a run")
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        (schema,) = database.execute("PRAGMA user_version").fetchone()
        if schema != SCHEMA:
            raise ValueError(
                f"{path} is of schema {schema}, this checker reads {SCHEMA}: "
                + ("bring the run up to date with `pipelinerl migrate`" if schema < SCHEMA else "use the version that wrote it")
            )
        checkpoints = _checkpoints(run_folder / "checkpoints")  # before the ledger, which then holds all of their steps
        database.execute("BEGIN")  # all tables of one moment, also while the run goes on
        (ledger_id,) = database.execute("SELECT id FROM ledger").fetchone()
        damage = [f"row {key!r} of {table} was damaged" for table in TABLES for key in _damaged(database, table)]
        damage += [f"the ledger's file: {said}" for (said,) in database.execute("PRAGMA quick_check(9)") if said != "ok"]
        yield History(ledger_id=ledger_id, entries=_entries(database, damage), checkpoints=checkpoints, damage=damage)


def _entries(database: sqlite3.Connection, damage: list[str]) -> Iterator[Entry]:
    names = [field.name for field in dataclasses.fields(Entry)]
    for *row, said in database.execute(f"SELECT {', '.join(names)}, checksum FROM events ORDER BY seq"):
        if said != checksum_of(row):
            damage.append(f"entry {row[0]} was damaged")
        yield Entry(**dict(zip(names, row, strict=True)))


def _damaged(database: sqlite3.Connection, table: str) -> Iterator[Any]:
    """Yield the keys of rows that are not as they were written."""
    return (row[0] for *row, said in database.execute(f"SELECT * FROM {table}") if said != checksum_of(row))


def checksum_of(row: Iterable[Any]) -> int:
    """Return the XXH3-64 of the `repr` of a row as a tuple, bytes in it by their own XXH3-64; without its highest bit."""
    plain = tuple(xxhash.xxh3_64_intdigest(value) if isinstance(value, bytes) else value for value in row)
    return xxhash.xxh3_64_intdigest(repr(plain).encode()) & (1 << 63) - 1


def _checkpoints(folder: Path) -> tuple[Checkpoint, ...]:
    found = []
    for path in sorted(folder.glob("step-*/manifest.json")):
        if path.parent.suffix:  # a draft, or one being removed
            continue
        try:
            manifest = _read_manifest(path)
        except FileNotFoundError:  # the run goes on, and has removed it
            continue
        missing = [name for name, file in manifest["files"].items() if not _is_as_written(path.parent / name, file)]
        if path.exists():
            found.append(Checkpoint(name=path.parent.name, manifest=manifest, missing=tuple(missing)))
    return tuple(found)


_KINDS = {"schema": int, "checksum": str, "version": int, "num_samples": int, "commit": str, "samples": str, "files": dict}


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest. Raises `ValueError` where something is missing or of another kind."""
    manifest: Any = None
    try:
        manifest = json.loads(path.read_bytes())
        is_one = isinstance(manifest, dict) and all(isinstance(manifest.get(name), kind) for name, kind in _KINDS.items())
        is_one = is_one and manifest["schema"] == SCHEMA and manifest["checksum"] == _checksum_of_manifest(manifest)
    except (ValueError, RecursionError):
        is_one = False
    if not is_one:
        raise ValueError(f"{path} is not a checkpoint's manifest: it was damaged after it was written")
    return manifest


def _checksum_of_manifest(manifest: dict[str, Any]) -> str:
    content = {name: value for name, value in manifest.items() if name != "checksum"}
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _is_as_written(path: Path, file: dict[str, Any]) -> bool:
    if not path.is_file() or path.stat().st_size != file["bytes"]:
        return False
    digest = xxhash.xxh3_128()
    with open(path, "rb") as content:
        while chunk := content.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest() == file["xxh3"]
