"""The names and the owners of a run's shared buffers, known without torch: a launcher whose trainer was killed removes them by name.

A process that makes buffers holds a lock on a file beside them for as long as it lives, and the kernel lets go of it however it ends. So
every start of a run, and `pipelinerl doctor`, can remove what belongs to nobody any more (`sweep`), and never what a living process made.
An engine of several ranks on CPUs has buffers of vLLM's there, too, without an owner: their names go as soon as all ranks have them.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import xxhash

from pipelinerl.runtime.machine import SHARED_MEMORY

FOLDER = SHARED_MEMORY
"""The folder of weight buffers: memory that is also a file, so that an engine finds it by its name."""


OWNER_SUFFIX = ".owner"
_VLLM = "vllm_dist_"
"""Prefix of the few megabytes by which vLLM's tensor-parallel ranks on CPUs add up; they stay where a rank is killed."""
MEETING_S = 60.0
"""vLLM's ranks have all mapped such a buffer this long after it was made, wherever they are: in a container whose processes /proc does not
show, too. Its name is then of no use to anybody. Shorter could part ranks of a busy machine; longer leaves it for a later sweep."""


def run_token(run_folder: Path) -> str:
    """The name of a run that its weight buffers carry: the same after a restart, different for every run folder of the machine."""
    return xxhash.xxh3_64_hexdigest(str(run_folder.resolve()).encode())


def unlink_buffers(token: str, *, folder: Path = FOLDER) -> None:
    """Remove every buffer a run left behind; for the trainer when it starts and ends, and for a launcher whose trainer was killed."""
    for path in folder.glob(f"pipelinerl-{token}-*"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


class Owner:
    """This process's claim on the buffers of one token, until `close` or its end. Both ends of it remove those that are there."""

    def __init__(self, token: str, *, folder: Path = FOLDER) -> None:
        self._token, self._folder = token, folder
        unlink_buffers(token, folder=folder)
        path = folder / f"pipelinerl-{token}-{os.getpid()}{OWNER_SUFFIX}"
        while True:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if os.fstat(self._file).st_nlink:  # else a sweep came between making and locking it
                break
            os.close(self._file)

    def close(self) -> None:
        """Give the claim up; may be called again."""
        unlink_buffers(self._token, folder=self._folder)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def sweep(*, folder: Path = FOLDER) -> int:
    """Remove the buffers of this user's processes that have ended, vLLM's included; return how many bytes they held."""
    freed = _sweep_vllm(folder)
    for token in {path.name.split("-")[1] for path in folder.glob(f"pipelinerl-*-*{OWNER_SUFFIX}")}:
        with _all_locked(sorted(folder.glob(f"pipelinerl-{token}-*{OWNER_SUFFIX}"))) as are_dead:
            if are_dead:
                freed += sum(path.stat().st_blocks * 512 for path in folder.glob(f"pipelinerl-{token}-*"))
                unlink_buffers(token, folder=folder)
    return freed


def forget_vllm_names(identity: str, *, folder: Path = FOLDER) -> None:
    """Remove the names of the buffers of one vLLM engine, all of whose ranks have mapped them: they end with the last of these."""
    for path in folder.glob(f"{glob.escape(identity)}-*-cpushm_*"):
        path.unlink(missing_ok=True)


def _sweep_vllm(folder: Path) -> int:
    """Remove the buffers of vLLM engines that were killed while they started: those that no process has mapped."""
    freed, mapped = 0, None
    for path in folder.glob(f"{_VLLM}*-cpushm_*"):
        with contextlib.suppress(FileNotFoundError):
            state = path.lstat()
            if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or time.time() - state.st_mtime < MEETING_S:
                continue
            mapped = _mapped() if mapped is None else mapped
            if (os.major(state.st_dev), os.minor(state.st_dev), state.st_ino) not in mapped:
                path.unlink()
                freed += state.st_blocks * 512
    return freed


def _mapped() -> set[tuple[int, int, int]]:
    """(major, minor, inode) of every file that a process of this user has mapped, as far as /proc shows them."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # another user's, or gone this moment
            for words in map(str.split, maps.read_text(errors="replace").splitlines()):
                major, minor = words[3].split(":")
                found.add((int(major, 16), int(minor, 16), int(words[4])))
    return found


@contextlib.contextmanager
def _all_locked(owners: list[Path]) -> Iterator[bool]:
    """Lock all of these; True where nobody held any, and they are ours. While the block runs, nobody else can."""
    with contextlib.ExitStack() as at_end:
        try:
            for path in owners:
                file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                at_end.callback(os.close, file)
                state = os.fstat(file)
                if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
                    raise PermissionError
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another user's, a living process's, or gone this moment
            yield False
        else:
            yield True
