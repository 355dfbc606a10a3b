"""Processes that run beside a run and that nothing depends on: one may fail, hang or be killed, and the run goes on.

When the run has ended, each gets `rest_s` to finish, or less where its machine is taken before; what it has not done by then, its `remedy`
does: a command for the user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pipelinerl.runtime.process import end_all, how_it_ended, note

QUIET_S = 2.0
"""A longer wait for a sidecar is spoken of: most end sooner, and whoever sees nothing for longer thinks that the run hangs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """One such process. It ends at SIGTERM, when its work is done: with 0 where all is, else with another code."""

    name: str
    """Also its log's: `<run>/logs/<name>.log`."""
    command: tuple[str, ...]
    rest_s: float
    remedy: str
    """The command that does what it left undone."""

    def __str__(self) -> str:
        return f"{self.name:<13} {shlex.join(self.command)}"


@contextlib.contextmanager
def sidecars(run_folder: Path, wanted: Sequence[Sidecar], *, left_s: Callable[[], float] = lambda: math.inf) -> Iterator[None]:
    """Run sidecars while the block runs; afterwards wait for their rest, and say what is left undone.

    `left_s()` is asked after the block: seconds that all of them have at most.
    """
    started = [(sidecar, _start(run_folder, sidecar)) for sidecar in wanted]
    is_over = threading.Event()
    for sidecar, process in started:
        threading.Thread(target=_reap, args=(run_folder, sidecar, process, is_over), name=sidecar.name, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        for _, process in started:
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + left_s() if started else 0.0
        for sidecar, process in sorted(started, key=lambda one: one[0].rest_s):
            if not _has_finished(run_folder, sidecar, process, within_s=max(0.0, min(sidecar.rest_s, end - time.monotonic()))):
                print(f"{sidecar.name} has not finished (its log: {_log_of(run_folder, sidecar)}); {sidecar.remedy}", flush=True)


def _has_finished(run_folder: Path, sidecar: Sidecar, process: subprocess.Popen[bytes], *, within_s: float) -> bool:
    """Wait for the end of a sidecar that was asked to end, and kill it after `within_s`; whether all of its work is done."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(min(within_s, QUIET_S)) == 0
    if (rest_s := within_s - QUIET_S) > 0:
        print(f"waiting up to {rest_s:.0f} s more for {sidecar.name} (its log: {_log_of(run_folder, sidecar)})", flush=True)
    return end_all([process], grace_s=max(0.0, rest_s)) == [0]


def _start(run_folder: Path, sidecar: Sidecar) -> subprocess.Popen[bytes]:
    path = _log_of(run_folder, sidecar)
    path.parent.mkdir(exist_ok=True)
    with open(path, "ab") as log:
        return subprocess.Popen(sidecar.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def _reap(run_folder: Path, sidecar: Sidecar, process: subprocess.Popen[bytes], is_over: threading.Event) -> None:
    """Wait for a sidecar's end, which leaves no zombie then; where the run goes on without it, say so at once."""
    code = process.wait()
    if is_over.is_set():
        return
    line = f"{sidecar.name} {how_it_ended(code)}: the run goes on without it, and `{sidecar.remedy}` does what it left undone"
    print(line, file=sys.stderr, flush=True)
    note(run_folder, line)


def _log_of(run_folder: Path, sidecar: Sidecar) -> Path:
    return run_folder / "logs" / f"{sidecar.name}.log"
