"""Every process of a run registers by name, dies with its parent, and leaves its last error where the launcher finds it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NoReturn

from pipelinerl.errors import ConfigError, PeerGone, PeerSilent, PipelineError
from pipelinerl.runtime.machine import machine_id

_PR_SET_PDEATHSIG = 1
UNWRITTEN = 74
"""Exit code of a process that could write neither its error nor its log; EX_IOERR of sysexits.h."""


def die_with_parent(parent_id: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, however that ends (Linux).

    A parent that knows its id hands it over (`parent_id`): then one that is gone already is noticed, too.
    """
    parent_id = parent_id or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_id:
        os.kill(os.getpid(), signal.SIGKILL)


def keep_to(cores: Collection[int]) -> None:
    """Have this process, and what it starts from now on, run on these cores alone (`run.cores`); on any where none is named.

    Raises `ConfigError` where this machine has none of them.
    """
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        here = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ConfigError(
            f"run.cores names {', '.join(map(str, cores))}, and processes here may use {here}: name cores that every machine has on which"
            " the orchestrator or a scorer runs, or none"
        ) from error


@contextlib.contextmanager
def crash_report(run_folder: Path, process: str) -> Iterator[None]:
    """Record the error that ends this process in `<run>/failures/<process>.json`, print it, and exit with 1; where the disk takes no
    word of it, with `UNWRITTEN`.

    It may first open as many files as the system allows: connections are files, too, also those of strangers.

    Errors of our own tree print as one message; anything else with its traceback. `KeyboardInterrupt` and `SystemExit` pass through.
    """
    allow_open_files()
    try:
        yield
    except Exception as error:  # the outermost boundary of a process: whatever it is, it becomes the run's first error
        errors = list(_leaves(error))
        text = "\n".join(f"{type(leaf).__name__}: {leaf}" for leaf in errors)
        trace = "".join(traceback.format_exception(error))
        is_consequence = all(isinstance(leaf, PeerSilent | PeerGone) for leaf in errors)
        try:
            record_failure(run_folder, process, error=text, trace=trace, is_consequence=is_consequence)
            print(text if all(isinstance(leaf, PipelineError) for leaf in errors) else trace, file=sys.stderr, flush=True)
        except OSError:
            os._exit(UNWRITTEN)  # at once: what Python still has to print would fail, too
        sys.exit(1)


def allow_open_files() -> None:
    """Raise this process's soft limit of open files to the hard one, as far as the system lets it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def end_stuck(run_folder: Path, process: str, verdict: str) -> NoReturn:
    """Record why this process, which cannot go on, ends; then end it at once, with 1. Any thread may."""
    record_failure(run_folder, process, error=f"Stalled: {verdict.splitlines()[0]}", trace=verdict)
    print(verdict, file=sys.stderr, flush=True)
    os._exit(1)


def how_it_ended(code: int) -> str:
    """Tell how a process ended, from its exit code, which is negative for a signal: `was killed by SIGKILL`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"


def end_alike(code: int) -> NoReturn:
    """End this process as another did: by its exit code, or by the signal that killed it."""
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL and SIGSTOP have no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(abs(code))


def end_all(processes: Collection[subprocess.Popen[bytes]], *, grace_s: float) -> list[int]:
    """Ask processes to end, kill those that have not after `grace_s`, and return their exit codes."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    return [process.wait() for process in processes]


def hold_alone(path: Path, *, otherwise: str) -> int:
    """Hold the lock file `path` while this process lives; its descriptor. Raises `ConfigError` (`otherwise`) where another holds it."""
    path.parent.mkdir(exist_ok=True)
    lock = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(otherwise) from None
    return lock


def note(run_folder: Path, line: str) -> None:
    """Write a line, with the time, to `<run>/logs/launcher.log`; a full disk must not end who writes."""
    with contextlib.suppress(OSError):
        (run_folder / "logs").mkdir(exist_ok=True)
        with open(run_folder / "logs" / "launcher.log", "a") as log:
            log.write(f"{time.strftime('%H:%M:%S')} {line}\n")


def register(run_folder: Path, peer: str) -> None:
    """Write down that this process is a peer from now on, in `<run>/processes/<peer>`: whoever started it kills by this what it is asked to
    have replaced, and by nothing that came in a message."""
    folder = run_folder / "processes"
    folder.mkdir(exist_ok=True)
    draft = folder / f".{peer}.{os.getpid()}"
    draft.write_text(f"{machine_id()} {os.getpid()}")
    draft.replace(folder / peer)


def registered(run_folder: Path, peer: str) -> int | None:
    """Return the process of this machine that registered last as a peer, if that was one of this machine. It may have ended."""
    with contextlib.suppress(OSError, ValueError):
        where, process_id = (run_folder / "processes" / peer).read_text().rsplit(" ", 1)
        return int(process_id) if where == machine_id() else None
    return None


def ask_to_replace(run_folder: Path, peer: str) -> None:
    """Ask whoever started a peer that fell silent, or keeps saying what cannot be, to kill its process, and so to start it again.

    A file, because the process may be another machine's; its launcher looks for it, see `launch`.
    """
    folder = run_folder / "silent"
    folder.mkdir(exist_ok=True)
    (folder / peer).touch()


def asked_to_replace(run_folder: Path) -> Iterator[tuple[Path, str, int]]:
    """The open requests of `ask_to_replace` about processes of this machine: the file, to be removed by whoever fulfils it, the peer, and
    the process that has registered under its name. A request that is older than that process is about the one before, and removed."""
    for path in (run_folder / "silent").glob("*-*"):
        with contextlib.suppress(OSError):
            if (process_id := registered(run_folder, path.name)) is None:
                continue
            if (run_folder / "processes" / path.name).stat().st_mtime_ns > path.stat().st_mtime_ns:
                path.unlink()
            else:
                yield path, path.name, process_id


def ancestors(process_id: int) -> Iterator[int]:
    """A process's own id, its parent's, and so on, as far as the kernel tells (Linux)."""
    while process_id > 1:
        yield process_id
        try:
            process_id = int(Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return


def stopped_processes() -> list[int]:
    """Ids of all processes that were stopped by a signal and not continued (Linux)."""
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit() and _state_of(folder) == "T"]


def _state_of(folder: Path) -> str:
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # it has ended meanwhile
        return ""


def record_failure(run_folder: Path, process: str, *, error: str, trace: str = "", is_consequence: bool = False) -> None:
    """Write down what ended a process, for the launcher to show; a record that is there already stands.

    `is_consequence`: it ended because a peer did, and may do better with another one.
    """
    folder = run_folder / "failures"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError), open(folder / f"{process}.json", "x") as file:
        record = {"t": time.time(), "process": process, "role": process.partition("-")[0], "error": error, "traceback": trace}
        json.dump(record | {"is_consequence": is_consequence}, file)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
