"""The threads torch computes with. Set before torch is imported: it reads these settings once."""

from __future__ import annotations

import os


def set_threads(cores: tuple[int, ...], *, local_rank: int = 0) -> None:
    """Keep this process on its own core of `cores`, with one thread; without cores, leave both to the system."""
    # Threads that spin while they wait take the cores from everyone else: beside a busy engine, a step then takes several times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if cores:
        os.sched_setaffinity(0, {cores[local_rank]})
        os.environ["OMP_NUM_THREADS"] = "1"
