"""The memory of a process and all that it started, each shared page counted once (PSS)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

EVERY_S = 1.0
"""Seconds between two looks; one takes a hundredth of a second of a processor."""


class Peak:
    """The largest memory seen so far."""

    mib = 0.0


@contextlib.contextmanager
def peak_of(process_id: int) -> Iterator[Peak]:
    """Look at the memory of a process's tree, from a thread, until the block ends."""
    peak, has_ended = Peak(), threading.Event()

    def watch() -> None:
        while not has_ended.wait(EVERY_S):
            peak.mib = max(peak.mib, sum(map(_pss_mib, _tree(process_id))))

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield peak
    finally:
        has_ended.set()
        watching.join()


def _tree(process_id: int) -> Iterator[int]:
    yield process_id
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process_id}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _tree(int(child))


def _pss_mib(process_id: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0
