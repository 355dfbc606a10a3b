"""The id under which a tracker knows a training run, kept in the run folder and with every checkpoint.

A run that goes on anywhere has its checkpoints, so the newest one tells the id where the run folder does not.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path


def ids_of(run_folder: Path) -> dict[str, str]:
    """By tracker, as its own file in the run folder says; never raises."""
    found: dict[str, str] = {}
    for path in sorted((run_folder / "tracking").glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found[path.stem] = str(json.loads(path.read_text())["id"])
    return found


def id_in_checkpoint(run_folder: Path, tracker: str) -> str | None:
    """The id in the newest checkpoint that has one; None where none does."""
    for path in sorted((run_folder / "checkpoints").glob("step-*[0-9]/manifest.json"), reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            return str(json.loads(path.read_text())["trackers"][tracker])
    return None
