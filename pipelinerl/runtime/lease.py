"""One launcher for one run folder, on this machine and over a shared file system.

The launcher holds two things while it lives. A lock on `<run>/launcher.lock`: the kernel lets go of it the moment its holder dies, so on
one machine nothing is ever stale. And a lease, `<run>/lease.json`, for a file system whose other machines may not see that lock: it names
host, process and *epoch*, and is renewed every `RENEW_EVERY_S`; one that was not renewed for `LEASE_S` has lapsed. Ages are taken from the
file system's own clock, so machines whose clocks differ agree on them.

Each launcher takes the next epoch, by the one operation that is atomic on NFS, too: a link to a name that nobody has. What writes
durable state (ledger, checkpoints) looks at the lease before it writes and stops where a newer epoch stands there (`fence_of`): a launcher
that was cut off for longer than its lease cannot spoil the run of the one that took over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from pipelinerl.errors import LeaseError
from pipelinerl.runtime.machine import boot_id

LEASE_S = 60.0
"""Longer keeps a run waiting whose machine is gone; shorter has a busy file system end runs that live."""
RENEW_EVERY_S = 10.0
LOCK, FILE = "launcher.lock", "lease.json"
EPOCH = "PIPELINERL_EPOCH"
"""Environment variable by which the processes of a run know the epoch of their launcher; without it they hold no lease."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that holds a run folder, as its lease says."""

    epoch: int
    host: str
    boot_id: str
    """The kernel's, new at every start of a machine."""
    process_id: int
    since_s: float
    """Unix seconds."""
    has_ended: bool = False

    def __str__(self) -> str:
        return f"process {self.process_id} on {self.host}, since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since_s))}"


class Lease:
    """The hold of this process on a run folder."""

    def __init__(self, run_folder: Path, holder: Holder) -> None:
        self.epoch = holder.epoch
        self._folder = run_folder
        self._holder = holder
        self._renewed_at = time.monotonic()

    def renew_if_due(self) -> None:
        """Renew, now and then. Raises `LeaseError` where another launcher has taken the folder over."""
        if time.monotonic() - self._renewed_at < RENEW_EVERY_S:
            return
        check_epoch(self._folder, self.epoch)
        with contextlib.suppress(OSError):  # a file system that is away: who took over meanwhile is seen when it is back
            os.utime(self._folder / FILE)
            self._renewed_at = time.monotonic()

    def end(self) -> None:
        """Let go, unless another has taken over."""
        with contextlib.suppress(OSError, LeaseError):
            check_epoch(self._folder, self.epoch)
            _replace(self._folder, msgspec.structs.replace(self._holder, has_ended=True))


@contextlib.contextmanager
def held(run_folder: Path, *, takes_over: bool = False) -> Iterator[Lease]:
    """Hold a run folder for as long as the block runs.

    Raises `LeaseError` at once, and leaves the folder as it is, where another launcher holds it. `takes_over`: also where one of another
    machine does, whose lease has not lapsed; one of this machine that lives is never taken over.
    """
    with _locked(run_folder, takes_over=takes_over) as is_locked:
        lease = Lease(run_folder, _take(run_folder, is_locked=is_locked, takes_over=takes_over))
        try:
            yield lease
        finally:
            lease.end()


def check_epoch(run_folder: Path, epoch: int) -> None:
    """Raise `LeaseError` where a newer launcher than that of `epoch` holds the folder. Reads one small file."""
    holder = holder_of(run_folder)
    if holder is not None and holder.epoch > epoch:
        raise LeaseError(
            f"{run_folder} was taken over by {holder} (epoch {holder.epoch}, this is epoch {epoch}): this process writes nothing more"
        )


def fence_of(run_folder: Path, environment: Mapping[str, str]) -> Callable[[], None]:
    """Return what to call before a durable write to a run: it raises `LeaseError` where the run's launcher has been superseded."""
    epoch = environment.get(EPOCH)
    return (lambda: None) if epoch is None else lambda: check_epoch(run_folder, int(epoch))


def holder_of(run_folder: Path) -> Holder | None:
    """Return who holds a folder, or held it last; None where nobody did, or where its lease cannot be read."""
    # Opened anew each time: over NFS an open is what looks at the server.
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((run_folder / FILE).read_bytes(), type=Holder)
    return None


@contextlib.contextmanager
def _locked(run_folder: Path, *, takes_over: bool) -> Iterator[bool]:
    """Return False where the file system knows no locks, or another machine's is passed over: then the lease stands alone."""
    file = os.open(run_folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    is_locked = False
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        except BlockingIOError:
            holder = holder_of(run_folder)
            if not takes_over or holder is None or holder.boot_id == boot_id():
                whose = f"by {holder}" if holder else "by another launcher"
                raise LeaseError(f"{run_folder} is held {whose}: one run folder has one launcher. End that one first (Ctrl-C)") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        yield is_locked
    finally:
        os.close(file)


def _take(run_folder: Path, *, is_locked: bool, takes_over: bool) -> Holder:
    """Take the next epoch. A holder of this machine whose lock is free is dead."""
    before = holder_of(run_folder)
    is_dead = before is not None and is_locked and before.boot_id == boot_id()
    if before is not None and not before.has_ended and not is_dead:
        age_s = _age_s(run_folder, run_folder / FILE)
        if age_s < LEASE_S and not takes_over:
            raise LeaseError(
                f"{run_folder} is held by {before}, who renewed its lease {age_s:.0f} s ago: one run folder has one launcher. Where that"
                f" machine is gone, wait {LEASE_S - age_s:.0f} s, or say --take-over"
            )
    epoch = 1 + max([before.epoch if before else 0, *_claimed(run_folder, lapsed_only=True)])
    mine = Holder(epoch=epoch, host=socket.gethostname(), boot_id=boot_id(), process_id=os.getpid(), since_s=time.time())
    draft = _write_draft(run_folder, mine)
    try:
        os.link(draft, _claim(run_folder, epoch))
    except FileExistsError:
        raise LeaseError(f"{run_folder} is being taken by another launcher this very moment: one run folder has one launcher") from None
    finally:
        draft.unlink()
    _replace(run_folder, mine)
    for number in _claimed(run_folder):
        if number < epoch:
            _claim(run_folder, number).unlink(missing_ok=True)
    return mine


def _claim(run_folder: Path, epoch: int) -> Path:
    return run_folder / f"lease-{epoch}.claim"


def _claimed(run_folder: Path, *, lapsed_only: bool = False) -> list[int]:
    """Epochs that were claimed; `lapsed_only`: so long ago that who claimed them and got no further must be dead."""
    paths = list(run_folder.glob("lease-*.claim"))
    return [int(path.stem.removeprefix("lease-")) for path in paths if not lapsed_only or _age_s(run_folder, path) >= LEASE_S]


def _replace(run_folder: Path, holder: Holder) -> None:
    _write_draft(run_folder, holder).replace(run_folder / FILE)


def _write_draft(run_folder: Path, holder: Holder) -> Path:
    draft = run_folder / f"lease.{socket.gethostname()}.{os.getpid()}.draft"
    draft.write_bytes(msgspec.json.encode(holder))
    return draft


def _age_s(run_folder: Path, path: Path) -> float:
    """Seconds since a file was last touched, both instants on the clock of its file system."""
    os.utime(run_folder / LOCK)
    return (run_folder / LOCK).stat().st_mtime - path.stat().st_mtime
