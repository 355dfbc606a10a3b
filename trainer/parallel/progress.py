"""Who fell silent, where NCCL ends the process that waited: a table in which the ranks of a machine note how far they are.

gloo raises an error in a rank that waits past the deadline. NCCL's watchdog ends it, by SIGABRT: the ranks that were well go first, and the
one that hangs is not named. So a thread of each rank writes down, a few times a second, how many collectives the rank has entered. When one
of them ends by SIGABRT, the parent reads who is behind the others, or has stopped writing, and says that one's name.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping

PROGRESS = "PIPELINERL_PROGRESS"
"""Environment variable: the descriptor of the table's file, which ranks inherit."""
EVERY_S = 0.5
"""Between two entries of a rank. A dead thread is told from a live one by a few of them; more often costs processor time for nothing."""
STOPPED_S = 10.0
"""An entry so much older than the newest is that of a process that does not run any more: stopped, or stuck without letting threads run."""
_ENTRY = struct.Struct("=dq")
"""time.monotonic(), which is one clock for all processes of a machine, and the number of collectives."""


def make_table(num_ranks: int) -> int:
    """Make an empty table in memory; return its descriptor, to be inherited."""
    file = os.memfd_create("progress")
    os.ftruncate(file, num_ranks * _ENTRY.size)
    return file


def write_progress(count: Callable[[], int], *, environment: Mapping[str, str] = os.environ) -> None:
    """Start the thread that writes this rank's entries, where its parent made a table; `count` tells of collectives entered."""
    if PROGRESS not in environment:
        return
    place = int(environment["LOCAL_RANK"]) * _ENTRY.size
    table = mmap.mmap(int(environment[PROGRESS]), 0)

    def write() -> None:
        while True:
            _ENTRY.pack_into(table, place, time.monotonic(), count())
            time.sleep(EVERY_S)

    threading.Thread(target=write, name="progress", daemon=True).start()


def silent_ranks(file: int, *, first_rank: int) -> tuple[list[int], str]:
    """The ranks for whom the others waited, and how it shows; none where all are equally far.

    `first_rank` is the first of those on this machine, whose table it is.
    """
    with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as table:
        entries = dict(enumerate(_ENTRY.iter_unpack(table[:]), start=first_rank))
    newest = max(written_s for written_s, _ in entries.values())
    stopped = {rank: newest - written_s for rank, (written_s, _) in entries.items() if written_s and newest - written_s > STOPPED_S}
    if stopped:
        return list(stopped), ", ".join(f"rank {rank} wrote no sign of life for {age_s:.0f} s" for rank, age_s in stopped.items())
    furthest = max(count for _, count in entries.values())
    behind = {rank: count for rank, (_, count) in entries.items() if count < furthest}
    return list(behind), ", ".join(f"rank {rank} had entered {count} collectives and others {furthest}" for rank, count in behind.items())
