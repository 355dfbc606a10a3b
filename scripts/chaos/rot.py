"""Flips a bit in files that nobody is writing, as disks do. In a checkpoint, and in the ledger between two lives of a run."""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.snapshot import read_snapshot
from pipelinerl.errors import LedgerError
from pipelinerl.storage.checkpoint_folder import complete


def rot_checkpoint(run_folder: Path, *, chance: random.Random) -> bool:
    """Flip a bit of the newest checkpoint, where there is an older one to fall back to; return whether there was."""
    found = complete(run_folder / "checkpoints")
    if len(found) < 2:
        return False
    with contextlib.suppress(FileNotFoundError):  # it was just removed for newer ones
        flip(chance.choice(sorted(path for path in found[-1].iterdir() if path.is_file())), chance=chance)
        return True
    return False


def rot_ledger(run_folder: Path, *, chance: random.Random) -> str:
    """Flip a bit of the ledger of a run that stands still, see who tells, and put it back; return who did.

    Raises `AssertionError` where what can be read of it is otherwise than before and neither a resumed run nor the checker says so.
    """
    path, copy = run_folder / "ledger.sqlite", run_folder / "ledger.sqlite.whole"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copy2(path, copy)
    before = _told(path)
    try:
        place = flip(path, chance=chance)
        return _who_tells(run_folder, path, before=before, place=place)
    finally:
        for left in run_folder.glob("ledger.sqlite-*"):
            left.unlink()
        copy.replace(path)


def flip(path: Path, *, chance: random.Random) -> int:
    """Change one bit of a file; return which."""
    content = bytearray(path.read_bytes())
    place = chance.randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)
    return place


def _who_tells(run_folder: Path, path: Path, *, before: list[str] | None, place: int) -> str:
    if _told(path) == before:
        return "nobody, nothing reads it"
    try:
        with contextlib.closing(Ledger(path)) as ledger:
            read_snapshot(ledger)
    except LedgerError:
        return "a resumed run"
    checked = subprocess.run([sys.executable, "-m", "pipelinerl.checker", str(run_folder)], capture_output=True, check=False)
    assert checked.returncode, f"bit {place} of {path} flipped, and nobody noticed"
    return "the checker"


def _told(path: Path) -> list[str] | None:
    """All that SQLite reads of a file; None where it cannot."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            return list(database.iterdump())
    except (sqlite3.Error, UnicodeDecodeError, OverflowError):
        return None
