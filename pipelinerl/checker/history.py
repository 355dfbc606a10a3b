"""A run's history as plain values: the ledger's entries in order, and what the checkpoints say of themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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
    place: int | None
    peer: str | None
    reason: str | None
    reward: float | None
    oldest: int | None
    newest: int | None
    num_tokens: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint folder."""

    name: str
    manifest: dict[str, Any]
    missing: tuple[str, ...]
    """Files its manifest lists that are not there, or not of their size."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    ledger_id: str
    entries: Iterator[Entry]
    checkpoints: tuple[Checkpoint, ...]
    """Oldest first."""


@contextlib.contextmanager
def open_history(run_folder: Path) -> Iterator[History]:
    """Open the ledger for reading; a run may be writing it meanwhile. Raises `FileNotFoundError`, `ValueError` for a damaged manifest."""
    path = run_folder / "ledger.sqlite"
    if not path.is_file():
        raise FileNotFoundError(f"no ledger at {path}: name the folder of a run")
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        (ledger_id,) = database.execute("SELECT id FROM ledger").fetchone()
        names = [field.name for field in dataclasses.fields(Entry)]
        rows = database.execute(f"SELECT {', '.join(names)} FROM events ORDER BY seq")
        entries = (Entry(**dict(zip(names, row, strict=True))) for row in rows)
        yield History(ledger_id=ledger_id, entries=entries, checkpoints=_checkpoints(run_folder / "checkpoints"))


def _checkpoints(folder: Path) -> tuple[Checkpoint, ...]:
    found = []
    for path in sorted(folder.glob("step-*/manifest.json")):
        if path.parent.suffix:  # a draft, or one being removed
            continue
        manifest = _read_manifest(path)
        missing = [name for name, size in manifest["files"].items() if not _has_size(path.parent / name, size)]
        found.append(Checkpoint(name=path.parent.name, manifest=manifest, missing=tuple(missing)))
    return tuple(found)


_KINDS = {"version": int, "num_samples": int, "commit": str, "samples": str, "files": dict}


def _read_manifest(path: Path) -> dict[str, Any]:
    """Raises `ValueError` where something is missing or of another kind."""
    manifest: Any = None
    try:
        manifest = json.loads(path.read_bytes())
        is_one = isinstance(manifest, dict) and all(isinstance(manifest.get(name), kind) for name, kind in _KINDS.items())
    except (ValueError, RecursionError):
        is_one = False
    if not is_one:
        raise ValueError(f"{path} is not a checkpoint's manifest: it was damaged after it was written")
    return manifest


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size
