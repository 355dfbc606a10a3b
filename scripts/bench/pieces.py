"""A bench made in pieces: the figures of each run are a file, so that it may be interrupted at any moment and called again.

`--budget-s 150` starts nothing after 150 s; the next call goes on with what is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

ROOT = Path(__file__).resolve().parents[2]
BUDGET = {"--budget-s": {"type": float, "default": float("inf"), "help": "start nothing after so many seconds; call again to go on"}}
"""The option of a bench that is made in pieces."""


def hash_of(places: Sequence[str]) -> str:
    """Return the hash of the Python files in some folders of the repository, or of some files."""
    digest = hashlib.sha256()
    for place in places:
        for path in sorted((ROOT / place).rglob("*.py")) if (ROOT / place).is_dir() else [ROOT / place]:
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


Key = TypeVar("Key", bound=tuple[str | int, ...])


class Pieces(Generic[Key]):
    """The runs that are wanted, by their keys, and those that are made."""

    def __init__(self, folder: Path, wanted: Sequence[Key], *, budget_s: float) -> None:
        self.wanted = wanted
        self._folder = folder
        self._end = time.monotonic() + budget_s

    @property
    def made(self) -> dict[Key, dict[str, Any]]:
        """The figures of every run made so far, in the order in which they are wanted."""
        return {key: json.loads(self._path(key).read_text()) for key in self.wanted if self._path(key).exists()}

    @property
    def missing(self) -> list[Key]:
        return [key for key in self.wanted if not self._path(key).exists()]

    @property
    def may_start(self) -> bool:
        """Whether the budget lasts."""
        return time.monotonic() < self._end

    def keep(self, key: Key, figures: dict[str, Any]) -> None:
        """Write a run's figures whole or not at all."""
        draft = self._path(key).with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(figures))
        draft.replace(self._path(key))

    def _path(self, key: Key) -> Path:
        return self._folder / f"{'-'.join(map(str, key))}.json"
