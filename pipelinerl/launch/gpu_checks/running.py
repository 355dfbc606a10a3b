"""Runs checks, a process each, one after another, and tells what came of every one.

A process that ends badly, or never, is a result of its own check; the next one runs all the same, once nothing is left of it. The results
stand in a JSON file, written anew after each, so that a machine that goes down in the middle leaves what was known.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import msgspec

from pipelinerl.launch.gpu_checks.table import Check
from pipelinerl.runtime.findings import Finding, Level
from pipelinerl.runtime.process import how_it_ended

END_GRACE_S = 10.0
"""For a process that passed its deadline to end its own children, before all are killed."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one check."""

    name: str
    what: str
    goal: str
    level: Level
    found: str
    do: str
    unseen: tuple[str, ...]
    """What this machine could not show of it."""
    seconds: float
    figures: dict[str, Any]
    """As the check's program printed them."""
    log: str
    """The last lines that its program wrote to standard error, where it failed; else empty."""

    def finding(self) -> Finding:
        """The result for a person."""
        goal = f"; goal: {self.goal}" if self.level in (Level.WARN, Level.FAIL) else ""
        unseen = f" [not seen here: {'; '.join(self.unseen)}]" if self.unseen else ""
        return Finding(self.level, self.name, self.found + goal + unseen, self.do)


def run_all(checks: Iterable[Check], *, path: Path, tell: Callable[[Result], None]) -> list[Result]:
    """Run checks in order, tell each result as it comes, and keep all in the JSON file at `path`."""
    results: list[Result] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    for check in checks:
        results.append(run(check))
        draft = path.with_suffix(".draft")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
        draft.replace(path)
        tell(results[-1])
    return results


def run(check: Check) -> Result:
    """Run a check's program to its end, or to its deadline, and judge what it measured."""
    started = time.monotonic()
    figures, error, do, log = _run_program(check)
    level, found = Level.FAIL, error
    unseen: tuple[str, ...] = ()
    if figures is not None:
        try:
            unseen = tuple(figures.pop("unseen", ()))
            level, found, do = check.verdict(figures)
        except (LookupError, TypeError, ValueError) as wrong:
            found, do = f"its program measured something else than the check knows: {wrong!r}", _by_hand(check)
    return Result(
        name=check.name,
        what=check.what,
        goal=check.goal,
        level=Level.NOTE if unseen and level is Level.OK else level,
        found=found,
        do=do,
        unseen=unseen,
        seconds=round(time.monotonic() - started, 1),
        figures=figures or {},
        log=log if level is Level.FAIL else "",
    )


LOG_LINES = 30
"""Of a failed check's standard error that are kept: a traceback and what led to it."""


def _run_program(check: Check) -> tuple[dict[str, Any] | None, str, str, str]:
    """(figures, "", "", log) of a program, or (None, why not, what to do, log)."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
        process = subprocess.Popen((sys.executable, *check.program), stdout=said, stderr=complained, start_new_session=True)
        try:
            code = process.wait(check.deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        log = _lines_of(complained)[-LOG_LINES:]
        last, text = log[-1] if log else "it said nothing", "\n".join(log)
        if code is None:
            do = f"`py-spy dump` shows where it hangs, {_by_hand(check)}"
            return (
                None,
                f"no answer within {check.deadline_s:g} s; last it said: {last}" if log else f"no answer within {check.deadline_s:g} s",
                do,
                text,
            )
        if code:
            return None, f"{how_it_ended(code)}: {last}", _by_hand(check), text
        printed = _lines_of(said)[-1:]
        try:
            figures = json.loads(printed[0]) if printed else None
        except ValueError:
            figures = None
        if not isinstance(figures, dict):
            return None, f"ended well and printed no figures: {printed[0] if printed else ''!r}", _by_hand(check), text
        return figures, "", "", text


def _by_hand(check: Check) -> str:
    return f"by hand: python {shlex.join(check.program)}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program, if it runs, and all that it has left behind in its session: that would take memory of the checks that follow."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _lines_of(file: IO[bytes]) -> list[str]:
    """The lines of a file that have something in them."""
    file.seek(0)
    return [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
