"""Real processes for tests: small Python programs, and whether they still live."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PATIENCE_S = 30.0
"""After so long what should happen does not. Generous: the machine may be busy with something else."""


def program(code: str, **values: object) -> tuple[str, ...]:
    """The command line of a Python program; `values` are variables it begins with."""
    begin = "".join(f"{name} = {(str(value) if isinstance(value, Path) else value)!r}\n" for name, value in values.items())
    return (sys.executable, "-c", begin + textwrap.dedent(code))


@contextlib.contextmanager
def launched(code: str, folder: Path, *, within_s: float = PATIENCE_S) -> Iterator[None]:
    """Run a launcher of the run `folder`; at the end Ctrl-C ends it without an error."""
    with subprocess.Popen(program(code, folder=folder)) as launcher:
        try:
            yield
            launcher.send_signal(signal.SIGINT)
            assert launcher.wait(within_s) == 0
        finally:
            launcher.kill()


def wait_until(claim: Callable[[], bool], *, what: str, within_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + within_s
    while not claim():
        assert time.monotonic() < end, f"waited {within_s:g} s: {what}"
        time.sleep(0.01)


def read_when_written(path: Path) -> str:
    """A file's text, once there is some; writers rename it into place or write a single short line."""
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), what=f"nobody wrote {path.name}")
    return path.read_text().strip()


def is_alive(process_id: int) -> bool:
    """True while a process runs; one that has ended and waits for its parent is not alive."""
    try:
        with open(f"/proc/{process_id}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def end(process_id: int) -> None:
    """Clean up behind a test that failed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGKILL)
