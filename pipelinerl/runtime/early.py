"""Programs that begin before their run folder is there: what takes longest, their imports, runs beside the checks before a run.

`EarlyProcesses.start` runs `python -m PROGRAM --early` as soon as the settings are known. Such a program prepares by them, as far as it can
without a run (`arguments`), and waits. `take` hands it the rest of its command line, and from then on it is what that line would have
started: the same program in a session of its own, a child of the same parent, with its output in its log. One that could not prepare says
why as it would have said it without this. One that nobody takes is killed; like every process of a run, it dies with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from pipelinerl.runtime import startup
from pipelinerl.runtime.process import die_with_parent

EARLY = "--early"
_ROOM = " " * 1024
"""Makes the command line of an early process as long as what it shall show later, paths of a few hundred characters included."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What an early process was started for."""

    program: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    """Variables that are added to what it was started with."""
    log: str
    """Where its output goes from now on, with what it has printed so far."""


class EarlyProcesses:
    """The early processes that nobody has taken yet. A context: those left at its end are killed."""

    def __init__(self) -> None:
        self._waiting: dict[str, subprocess.Popen[bytes]] = {}
        """By program."""

    def __enter__(self) -> EarlyProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._waiting.values():
            process.kill()
            process.communicate()
        self._waiting.clear()

    def start(self, program: str, *, settings: str) -> None:
        """Start `python -m <program>`, one of each at most; `settings` are what it prepares by, in one line."""
        assert program not in self._waiting
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                (sys.executable, "-m", program, EARLY, _ROOM),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        self._waiting[program] = process
        _tell(process, settings.encode())

    def take(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes] | None:
        """Have the process that was started early for this command line be it; None where there is none, or it has ended."""
        if tuple(command[:2]) != (sys.executable, "-m") or (process := self._waiting.pop(command[2], None)) is None:
            return None
        order = Order(program=command[2], arguments=tuple(command[3:]), environment=dict(environment), log=str(log))
        is_told = process.poll() is None and _tell(process, msgspec.json.encode(order))
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        if not is_told:
            process.kill()
            process.wait()
        return process if is_told else None


def arguments(prepare: Callable[[bytes], object]) -> list[str]:
    """The arguments of this program; of one that was started early, once it has prepared by its settings and is told them.

    It ends here where nobody is left to tell it.
    """
    if sys.argv[1:2] != [EARLY]:
        return sys.argv[1:]
    with open(os.dup(0), "rb") as told:
        with contextlib.suppress(Exception):  # the program fails by it a second time, where its error is looked for
            prepare(told.readline())
        with startup.mark("waits for the run folder"):
            line = told.readline()
    if not line:
        sys.exit(0)
    order = msgspec.json.decode(line, type=Order)
    _print_to(Path(order.log))
    os.environ |= order.environment
    sys.argv[1:] = order.arguments
    _show_as((sys.executable, "-m", order.program, *order.arguments))
    return list(order.arguments)


def _tell(process: subprocess.Popen[bytes], line: bytes) -> bool:
    """Send a line; False where the process has ended."""
    assert process.stdin is not None
    try:
        process.stdin.write(line + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return False
    return True


def _print_to(path: Path) -> None:
    """Put what was printed so far into a log, and go on there; nothing is read from now on."""
    sys.stdout.flush()
    sys.stderr.flush()
    printed = os.pread(1, os.fstat(1).st_size, 0)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(log, printed)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)


def _show_as(command: Sequence[str]) -> None:
    """Have `ps` show this command line in place of the one that this process was started by, as far as there is room in it (Linux)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(field) for field in fields[45:47])  # arg_start and arg_end of proc(5), 0 where the kernel does not tell
    if start:
        line = b"".join(os.fsencode(word) + b"\0" for word in command)[: end - start - 1]
        ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)
