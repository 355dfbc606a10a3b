"""Starts the processes of a run, sees that none is left behind, and names the one whose error came first.

A process is known only as a command line, so the same run starts locally, under a batch system, or by hand. Each runs in a session of
its own with its output in `<run>/logs/<name>.log`; each dies with its parent, so that even a killed launcher leaves no orphan.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.errors import PeerGone
from pipelinerl.process import die_with_parent
from pipelinerl.transport.curve import make_keys
from pipelinerl.weights.slots import run_token, unlink_slots

SAVE_GRACE_S = 60.0
"""How long processes may take to save and end once the orchestrator has ended. Shorter cuts off large models being written."""
KILL_GRACE_S = 5.0
"""Between asking a process to end and killing it, after another has failed."""
LOG_TAIL_LINES = 15


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One process of a run."""

    name: str
    command: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name:<13} {shlex.join(self.command)}"


def roles_of(config: Config, run_folder: Path) -> tuple[Role, ...]:
    """The processes of a run, as command lines; the orchestrator first."""
    python, run = sys.executable, ("--run-folder", str(run_folder))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(config.trainer.ranks), "-m", "trainer")
    return (
        Role(name="orchestrator", command=(python, "-m", "orchestrator", *run)),
        Role(name="engines", command=(python, "-m", "pipelinerl.engine", *run)),
        Role(name="scorer-0", command=(python, "-m", "pipelinerl.scorer", *run, "--index", "0")),
        Role(name="trainer", command=(python, *torchrun, *run)),
    )


def make_run_folder(config: Config) -> Path:
    """Make `<run.folder>/<run.name>-<time>`, with the resolved config and fresh keys in it, readable by its owner only."""
    config.run.folder.mkdir(parents=True, exist_ok=True)
    name = f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = sum(1 for _ in config.run.folder.glob(f"{name}*"))
    folder = config.run.folder / (f"{name}-{number + 1}" if number else name)
    folder.mkdir(mode=0o700)
    (folder / "config.json").write_text(config.model_dump_json(indent=2))
    make_keys(folder)
    return folder


class Launcher:
    """Runs the processes of one run to their end."""

    def __init__(self, roles: tuple[Role, ...], run_folder: Path) -> None:
        self._roles = roles
        self._run_folder = run_folder
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._num_interrupts = 0
        self._is_overdue = False
        """The run failed because a process did not end, not because one ended badly."""
        self._failed_at = 0.0
        """Unix seconds at which a failure was noticed; what others record after it, they record because they were ended."""

    async def run(self) -> None:
        """Start everything and wait for the end. Raises `PeerGone` naming the process that failed first, with its own words."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        try:
            for role in self._roles:
                await self._start(role)
            failed = await self._wait()
        finally:
            await self._end_all()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        if failed is not None:
            raise PeerGone(self._explain(failed))

    async def _start(self, role: Role) -> None:
        (self._run_folder / "logs").mkdir(exist_ok=True)
        log = os.open(self._run_folder / "logs" / f"{role.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._processes[role.name] = await asyncio.create_subprocess_exec(
                *role.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        finally:
            os.close(log)

    async def _wait(self) -> str | None:
        """Wait until all have ended well, or one has not; its name then. The others may outlive the orchestrator by `SAVE_GRACE_S`."""
        waiting = {asyncio.create_task(process.wait(), name=name) for name, process in self._processes.items()}
        loop = asyncio.get_running_loop()
        deadline_s: float | None = None
        while waiting:
            timeout_s = None if deadline_s is None else deadline_s - loop.time()
            done, waiting = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            failed = [task.get_name() for task in done if task.result() != 0]
            if failed or not done:
                self._failed_at = time.time()
                self._is_overdue = not failed
                for task in waiting:
                    task.cancel()
                return failed[0] if failed else min(task.get_name() for task in waiting)
            if deadline_s is None and any(task.get_name() == self._roles[0].name for task in done):
                deadline_s = loop.time() + SAVE_GRACE_S
        return None

    def _interrupt(self) -> None:
        """First: have the orchestrator end the run, which saves. Second: end everything at once."""
        self._num_interrupts += 1
        orchestrator = self._processes.get("orchestrator")
        if self._num_interrupts == 1 and orchestrator is not None and orchestrator.returncode is None:
            orchestrator.terminate()
        else:
            self._signal_all(signal.SIGKILL)

    async def _end_all(self) -> None:
        self._signal_all(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_GRACE_S):
                for process in self._processes.values():
                    await process.wait()
        self._signal_all(signal.SIGKILL, even_ended=True)
        for process in self._processes.values():
            await process.wait()
        unlink_slots(run_token(self._run_folder))

    def _signal_all(self, number: signal.Signals, *, even_ended: bool = False) -> None:
        """Signal every process with its whole group; `even_ended`: also what a process that ended has left behind in its group."""
        for process in self._processes.values():
            if process.returncode is None or even_ended:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def _explain(self, failed: str) -> str:
        """The first error any process recorded; else how the failed one ended, with the end of its log."""
        records = [json.loads(path.read_text()) for path in (self._run_folder / "failures").glob("*.json")]
        log = self._run_folder / "logs" / f"{failed}.log"
        records = [record for record in records if record["t"] <= self._failed_at]
        if records:
            first = min(records, key=lambda record: record["t"])
            return f"{first['process']} failed: {first['error']}\n(its traceback is in {self._run_folder / 'failures'})"
        if self._is_overdue:
            return f"{failed} had not ended {SAVE_GRACE_S:g} s after the orchestrator, and was killed; its log is {log}"
        code = self._processes[failed].returncode
        how = f"was killed by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with exit code {code}"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        return f"{failed} {how}; its log {log} ends:\n{tail}"
