"""Where the seconds of a process's start went: marks of what it did until it could work, which its journal gets once there is one.

A fork inherits what its parent has noted: an engine's start is that of the process that imported for it, too.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

_marks: list[tuple[str, float, float]] = []
"""(what, its begin, its end in Unix seconds)."""


class Writes(Protocol):
    """A journal."""

    def write(self, kind: str, **fields: object) -> None: ...


@contextlib.contextmanager
def mark(what: str, *, since_s: float | None = None) -> Iterator[None]:
    """Note how long this took, from now or from `since_s` (Unix seconds) on, and what."""
    began = time.time() if since_s is None else since_s
    yield
    _marks.append((what, began, time.time()))


def begun_s() -> float:
    """Unix seconds at which this process began (Linux), to a hundredth; now, where the kernel does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def write(journal: Writes) -> None:
    """Write the marks down, and forget them."""
    for what, start, end in _marks:
        journal.write("startup", what=what, start=start, end=end)
    _marks.clear()
