"""The names of a run's shared buffers, known without torch: a launcher whose trainer was killed removes them by name."""

from __future__ import annotations

import contextlib
from pathlib import Path

import xxhash

FOLDER = Path("/dev/shm")
"""Where slots live: memory that is also a file, so that a name is all an engine needs to find it."""


def run_token(run_folder: Path) -> str:
    """A name for the run that its slots carry: the same after a restart, different for every run folder of the machine."""
    return xxhash.xxh3_64_hexdigest(str(run_folder.resolve()).encode())


def machine() -> str:
    """What tells machines apart for shared memory: equal where two processes see the same `/dev/shm`, also among containers."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{FOLDER.stat().st_dev}"


def unlink_slots(token: str, *, folder: Path = FOLDER) -> None:
    """Remove every slot a run left behind; for the trainer when it starts and ends, and for a launcher whose trainer was killed."""
    for path in folder.glob(f"pipelinerl-{token}-*"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
