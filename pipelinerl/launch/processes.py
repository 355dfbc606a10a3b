"""The processes that a launcher has started, each with the process group that it leads, and how each of them ended."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipelinerl.launch.roles import Role
from pipelinerl.runtime.early import EarlyProcesses
from pipelinerl.runtime.process import UNWRITTEN, ancestors, die_with_parent, how_it_ended

KILL_GRACE_S = 5.0
"""Seconds between asking a process to end and killing it, after another has failed."""
LOG_TAIL_LINES = 15


class Processes:
    """Starts processes, each in a session of its own, signals them, and reads what they recorded of their ends."""

    def __init__(self, run_folder: Path, *, environment: dict[str, str], early: EarlyProcesses | None = None) -> None:
        """`environment` is added to this process's own; `early` are processes that have begun without their run folder."""
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        """Names of processes, in the order in which they ended."""
        self.started_at: dict[str, float] = {}
        """Unix seconds of each process's last start."""
        self._run_folder = run_folder
        self._environment = {"PYTHONUNBUFFERED": "1", **environment}
        self._early = early or EarlyProcesses()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._gone: dict[str, asyncio.Event] = {}
        """Set once the process of that name has ended."""

    async def start(self, role: Role, tasks: asyncio.TaskGroup) -> None:
        """Start a role's process, or take the one that began early, with its output in `<run>/logs/<name>.log`; a task of `tasks` waits
        for its end."""
        (self._run_folder / "logs").mkdir(exist_ok=True)
        self.started_at[role.name] = time.time()
        process = self._early.take(role.command, environment=self._environment, log=self._log_of(role.name)) or self._open(role)
        self._processes[role.name], self._gone[role.name] = process, (gone := asyncio.Event())
        threading.Thread(target=_wait_beside, args=(process, gone, asyncio.get_running_loop()), name=role.name, daemon=True).start()
        tasks.create_task(self._tell_end(role.name, gone), name=role.name)

    def _open(self, role: Role) -> subprocess.Popen[bytes]:
        log = os.open(self._log_of(role.name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            return subprocess.Popen(
                role.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self._environment},
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        finally:
            os.close(log)

    async def _tell_end(self, name: str, gone: asyncio.Event) -> None:
        await gone.wait()
        self.ended.put_nowait(name)

    def exit_code(self, name: str) -> int | None:
        """Return a process's exit code, negative for a signal; None while it runs."""
        return self._processes[name].returncode

    def is_running(self, name: str) -> bool:
        """Return whether a process was started and has not ended."""
        return name in self._processes and self.exit_code(name) is None

    def owns(self, process_id: int, names: Iterable[str] | None = None) -> bool:
        """Return whether a process is one of these, or of those named, or descends from one: no other is ever signalled."""
        wanted = self._processes if names is None else names
        ours = {self._processes[name].pid for name in wanted if self.is_running(name)}
        return not ours.isdisjoint(ancestors(process_id))

    def interrupt(self, name: str, number: signal.Signals) -> None:
        """Signal a process alone, without its group."""
        self._processes[name].send_signal(number)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Signal the whole group of a process, also of one that has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._processes[name].pid, number)

    def signal_all(self, number: signal.Signals, *, even_ended: bool = False) -> None:
        """Signal every process with its whole group; `even_ended`: also what a process that ended has left behind in its group."""
        for name, process in self._processes.items():
            if process.returncode is None or even_ended:
                self.signal(name, number)

    async def end_all(self) -> None:
        """Ask all to end, and kill those that have not after `KILL_GRACE_S`, with what ended ones left behind."""
        self.signal_all(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_GRACE_S):
                await self._wait_for_all()
        self.signal_all(signal.SIGKILL, even_ended=True)
        await self._wait_for_all()

    async def _wait_for_all(self) -> None:
        for gone in self._gone.values():
            await gone.wait()

    def was_killed(self, name: str) -> bool:
        """Return whether what ended a process lies outside of it: a signal, or only peers that were lost, by its own record."""
        code = self.exit_code(name)
        if code is not None and code < 0:
            return True
        if name == "trainer" and code == UNWRITTEN:  # the disk is full, which its checkpoints outlive: there may be room again
            return True
        records = [
            record
            for record in self._failures("*")  # also those put away because another process was started again meanwhile
            if record["t"] >= self.started_at[name] and name in (record["role"], record["process"])
        ]
        return all(record["is_consequence"] for record in records) and bool(records)

    def put_failures_away(self) -> None:
        """Keep what was recorded so far out of the account of a later failure."""
        for path in (self._run_folder / "failures").glob("*.json"):
            path.rename(path.with_suffix(f".healed-{time.time_ns()}"))

    def first_failure(self, *, before_s: float) -> str | None:
        """Tell the first error that any process recorded until `before_s` (Unix seconds); None where none did."""
        records = [record for record in self._failures("*.json") if record["t"] <= before_s]
        if not records:
            return None
        first = min(records, key=lambda record: record["t"])
        return f"{first['process']} failed: {first['error']}\n(its traceback is in {self._run_folder / 'failures'})"

    def how_it_ended(self, name: str) -> str:
        """Tell how a process ended."""
        code = self._processes[name].returncode
        assert code is not None, f"{name} runs"
        if code == UNWRITTEN:
            return f"ended and could not write why to {self._run_folder}: make room on the disk, and resume the run"
        return how_it_ended(code)

    def end_of_log(self, name: str) -> str:
        """Name a process's log and quote its last lines."""
        log = self._log_of(name)
        return f"its log {log} ends:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def _log_of(self, name: str) -> Path:
        return self._run_folder / "logs" / f"{name}.log"

    def _failures(self, pattern: str) -> list[dict[str, Any]]:
        """Read what processes recorded of their ends; half a record, as of a full disk, is none."""
        found: list[dict[str, Any]] = []
        for path in (self._run_folder / "failures").glob(pattern):
            with contextlib.suppress(ValueError):
                found.append(json.loads(path.read_text()))
        return found


def _wait_beside(process: subprocess.Popen[bytes], gone: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    """Wait for a process in a thread of its own: asyncio waits only for those that it has started itself."""
    process.wait()
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(gone.set)
