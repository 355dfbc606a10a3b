"""Attempts: the starts of a run over several nodes, each with a folder of its own in `<run>/logs`.

Every node writes there how it ended (`node-N.code`), and whoever deals out the nodes that the run is to save (`save`).
"""

from __future__ import annotations

from pathlib import Path

SAVE = "save"
"""File in an attempt's folder: the wish to save and end. A signal would reach, and end, every process of a node."""


def attempt_folder(run_folder: Path, attempt: int) -> Path:
    """The folder of an attempt."""
    return run_folder / "logs" / f"attempt-{attempt}"


def begin_attempt(run_folder: Path) -> int:
    """Make the folder of the next attempt and return its number. Only one may do so at a time."""
    attempt = sum(1 for _ in (run_folder / "logs").glob("attempt-*"))
    folder = attempt_folder(run_folder, attempt)
    folder.mkdir()
    for old in ("failures", "endpoints"):  # of the attempt before: who joins must wait for this one's
        if (run_folder / old).is_dir():
            (run_folder / old).rename(folder / f"{old}-before")
    return attempt


def code_file(run_folder: Path, attempt: int, *, node: int) -> Path:
    """Where a node writes its exit code when it ends; removed where another node takes its place within the attempt."""
    return attempt_folder(run_folder, attempt) / f"node-{node}.code"
