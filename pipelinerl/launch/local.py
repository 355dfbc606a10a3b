"""Starts the processes of a run, starts them again when they are killed, sees that none is left behind, and names whose error came first.

A process is known only as a command line, so the same run starts locally, under a batch system, or by hand. Each runs in a session of
its own with its output in `<run>/logs/<name>.log`; each dies with its parent, so that even a killed launcher leaves no orphan.

One that was killed is started again by itself, while the others go on: a trainer then starts from its last checkpoint, what a scorer
or an engine was asked for is asked for again, and an orchestrator goes on from the ledger and meets the others anew. Engines are forked,
and restarted, by a parent of their own. One that stands still is killed, and so started again: where the orchestrator asks for it, or
where a signal has stopped it. `run.restarts` bounds all this, for each process apart. One that ended, as an orchestrator told it that
was killed before it ended itself, is started again, too.
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
from typing import Any, TypedDict

from pipelinerl.config import Config
from pipelinerl.config.file import write_run
from pipelinerl.errors import ConfigError, LeaseError, PeerGone
from pipelinerl.launch.restarts import REJOIN_AFTER_S, Restarts
from pipelinerl.runtime.lease import EPOCH, Lease
from pipelinerl.runtime.process import UNWRITTEN, ancestors, asked_to_replace, die_with_parent, stopped_processes
from pipelinerl.transport.keys import make_keys
from pipelinerl.weights.shared_names import run_token, sweep, unlink_buffers

SAVE_GRACE_S = 60.0
"""How long processes may take to save and end once the orchestrator has ended. Shorter cuts off large models being written."""
KILL_GRACE_S = 5.0
"""Between asking a process to end and killing it, after another has failed."""
LOOK_EVERY_S = 1.0
"""Between two looks for processes that stand still."""
LOG_TAIL_LINES = 15


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One process of a run."""

    name: str
    command: tuple[str, ...]
    has_nothing_to_save: bool = False
    """When the orchestrator has ended, it may be ended, too: it may be one that started too late to be told."""

    def __str__(self) -> str:
        return f"{self.name:<13} {shlex.join(self.command)}"


def roles_of(config: Config, run_folder: Path, *, trainer_nodes: int = 1, engine_nodes: int = 1) -> tuple[Role, ...]:
    """The processes of a run, as command lines; the orchestrator first. Over several nodes, engines and trainer are one process on each."""
    python, run = sys.executable, ("--run-folder", str(run_folder))
    return (
        Role(name="orchestrator", command=(python, "-m", "orchestrator", *run)),
        *(
            Role(name=name, command=(python, "-m", "pipelinerl.engine", *run, *part), has_nothing_to_save=True)
            for name, part in _parts("engines", engine_nodes)
        ),
        Role(name="scorer-0", command=(python, "-m", "pipelinerl.rewards", *run, "--index", "0"), has_nothing_to_save=True),
        *([_prm_role(run)] if config.prm.is_used else []),
        *(Role(name=name, command=(python, *_trainer(config, part), *run, *part)) for name, part in _parts("trainer", trainer_nodes)),
    )


def _prm_role(run: tuple[str, str]) -> Role:
    """The process reward model is the scorer after those that run reward functions."""
    command = (sys.executable, "-m", "pipelinerl.rewards.prm.process", *run, "--index", "1")
    return Role(name="scorer-1", command=command, has_nothing_to_save=True)


def _parts(role: str, num_nodes: int) -> list[tuple[str, tuple[str, ...]]]:
    """(name, what tells it which part is its own) of the role's process on each node."""
    return [(role, ())] if num_nodes == 1 else [(f"{role}-{node}", ("--part", f"{node}/{num_nodes}")) for node in range(num_nodes)]


def _trainer(config: Config, part: tuple[str, ...]) -> tuple[str, ...]:
    """One rank meets nobody; several are started, and ended, by a parent of their own."""
    return ("-m", "trainer" if config.trainer.ranks == 1 and not part else "trainer.parallel.rendezvous")


def peers_of(config: Config) -> tuple[str, ...]:
    """The names of the orchestrator's peers."""
    num_scorers = 1 + config.prm.is_used
    counts = {"engine": config.engine.count, "scorer": num_scorers, "trainer": config.trainer.layout.replicas}
    return tuple(f"{role}-{number}" for role, count in counts.items() for number in range(count))


class Limits(TypedDict):
    """Of a `Launcher`."""

    restarts: int
    restart_wait_s: float
    stopped_limit_s: float


def limits_of(config: Config) -> Limits:
    """What a run's settings allow its launcher."""
    run = config.run
    return Limits(restarts=run.restarts, restart_wait_s=run.restart_wait_s, stopped_limit_s=config.pipeline.stall_limit_s)


def make_run_folder(config: Config) -> Path:
    """Make `<run.folder>/<run.name>-<time>`, with the resolved config and fresh keys in it, readable by its owner only.

    Raises `ConfigError` where it cannot be made or written: a file in its place, no permission, no room.
    """
    try:
        config.run.folder.mkdir(parents=True, exist_ok=True)
        return _make_run_folder(config)
    except OSError as error:
        raise ConfigError(
            f"run.folder {config.run.folder}: no run can be kept there: {error.strerror or error}"
            f" ({error.filename or config.run.folder}). Name a folder that you may write to and that has room, with run.folder=..."
        ) from error


def _make_run_folder(config: Config) -> Path:
    name = f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = sum(1 for _ in config.run.folder.glob(f"{name}*"))
    folder = config.run.folder / (f"{name}-{number + 1}" if number else name)
    folder.mkdir(mode=0o700)
    write_run(folder, config)
    make_keys(folder, peers_of(config))
    return folder


def forget_endpoints(run_folder: Path) -> None:
    """Remove what an orchestrator that is gone has published: who starts now must wait for the next one's."""
    for path in (run_folder / "endpoints").glob("*.json"):
        path.unlink()


class Launcher:
    """Runs the processes of one run to their end."""

    def __init__(
        self,
        roles: tuple[Role, ...],
        run_folder: Path,
        *,
        restarts: int = 0,
        restart_wait_s: float = 1.0,
        stopped_limit_s: float = float("inf"),
        lease: Lease | None = None,
    ) -> None:
        """`lease` is this process's hold on the folder, which it renews; the run ends at once where another launcher has taken over.

        `restarts` of each process within an hour, the first after `restart_wait_s`.

        A process that is stopped (SIGSTOP) for `stopped_limit_s` is killed: of the orchestrator, and of one that is only starting, nobody
        else would notice before long.
        """
        self._roles = roles
        self._run_folder = run_folder
        self._lease = lease
        self._lost: LeaseError | None = None
        """Why the folder is not this launcher's any more."""
        self._restarts = {role.name: Restarts(budget=restarts, first_wait_s=restart_wait_s) for role in roles}
        self._started_at: dict[str, float] = {}
        """Unix seconds of each process's last start."""
        self._stopped_limit_s = stopped_limit_s
        self._stopped_since: dict[int, float] = {}
        """By process id, in Unix seconds."""
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._running: set[str] = set()
        """Those whose end was not taken from `_ended` yet."""
        self._ended: asyncio.Queue[str] = asyncio.Queue()
        self._left_at: dict[str, float] = {}
        """Those that ended well while the orchestrator lived: when, on the loop's clock."""
        self._deadline_s: float | None = None
        """Once the orchestrator has ended: when the others must have, on the loop's clock."""
        self._tasks = asyncio.TaskGroup()
        self._dismissed: set[str] = set()
        """Those that were ended because the run was over."""
        self._num_interrupts = 0
        self._is_overdue = False
        """The run failed because a process did not end, not because one ended badly."""
        self._failed_at = 0.0
        """Unix seconds at which a failure was noticed; what others record after it, they record because they were ended."""

    async def run(self) -> None:
        """Start everything and wait for the end. Raises `PeerGone` naming the process that failed first, with its own words.

        Raises `LeaseError` where another launcher has taken the folder over.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt, number)
        try:
            async with self._tasks:
                failed = await self._run_all()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        if self._lost is not None:
            raise self._lost
        if failed is not None:
            raise PeerGone(self._explain(failed))

    async def _run_all(self) -> str | None:
        """Start, restart and end all; return the name of the process that ended the run badly."""
        if freed := sweep():
            self._note(f"removed {freed >> 20} MiB that processes which were killed had left in shared memory")
        overseer = self._tasks.create_task(self._oversee(), name="overseer")
        try:
            for role in self._roles:
                await self._start(role)
            while (failed := await self._wait()) is not None and (wait_s := self._may_restart(failed)) is not None:
                await self._restart(failed, wait_s=wait_s)
            return failed
        finally:
            overseer.cancel()
            await self._end_all()

    def _may_restart(self, failed: str) -> float | None:
        """Seconds until a process that failed may be started again; None where it may not, and the run ends."""
        is_over = self._deadline_s is not None  # whoever starts after the orchestrator has ended would wait for it in vain
        if self._lost or self._num_interrupts or self._is_overdue or is_over or not self._was_killed(failed):
            return None
        now_s = time.time()
        return self._restarts[failed].next_wait(now_s=now_s, lived_s=now_s - self._started_at[failed])

    def _was_killed(self, failed: str) -> bool:
        """True where what ended a process lies outside of it: a signal, or only peers that were lost, by its own words."""
        code = self._processes[failed].returncode
        if code is not None and code < 0:
            return True
        words = [
            record
            for record in self._failures("*")  # also those put away because another process was started again meanwhile
            if record["t"] >= self._started_at[failed] and failed in (record["role"], record["process"])
        ]
        if failed == "trainer" and code == UNWRITTEN:  # the disk is full, which its checkpoints outlive: there may be room again
            return True
        return all(record["is_consequence"] for record in words) and bool(words)

    async def _restart(self, failed: str, *, wait_s: float) -> None:
        role = next(role for role in self._roles if role.name == failed)
        for path in (self._run_folder / "failures").glob("*.json"):
            path.rename(path.with_suffix(f".healed-{time.time_ns()}"))
        count = self._restarts[failed].count
        self._note(f"{failed} {self._how_it_ended(failed)}; starting it again in {wait_s:g} s (restart {count})")
        self._signal(failed, signal.SIGKILL)  # what it left behind in its group
        if failed == "orchestrator":
            forget_endpoints(self._run_folder)
        await asyncio.sleep(wait_s)
        await self._start(role)

    def _note(self, line: str) -> None:
        """Write a line to `<run>/logs/launcher.log`."""
        with contextlib.suppress(OSError):  # a full disk must not end us
            (self._run_folder / "logs").mkdir(exist_ok=True)
            self._append(line)

    def _append(self, line: str) -> None:
        with open(self._run_folder / "logs" / "launcher.log", "a") as log:
            log.write(f"{time.strftime('%H:%M:%S')} {line}\n")

    async def _start(self, role: Role) -> None:
        (self._run_folder / "logs").mkdir(exist_ok=True)
        self._started_at[role.name] = time.time()
        log = os.open(self._run_folder / "logs" / f"{role.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._processes[role.name] = await asyncio.create_subprocess_exec(
                *role.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **({EPOCH: str(self._lease.epoch)} if self._lease else {})},
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        finally:
            os.close(log)
        self._running.add(role.name)
        self._tasks.create_task(self._tell_end(role.name, self._processes[role.name]), name=role.name)

    async def _tell_end(self, name: str, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        self._ended.put_nowait(name)

    async def _wait(self) -> str | None:
        """Wait until all have ended well, or one has not; its name then. The others may outlive the orchestrator by `SAVE_GRACE_S`."""
        loop = asyncio.get_running_loop()
        while self._running:
            try:
                async with asyncio.timeout_at(self._deadline_s):
                    name = await self._ended.get()
            except TimeoutError:
                self._failed_at, self._is_overdue = time.time(), True
                return min(self._running)
            self._running.discard(name)
            if self._processes[name].returncode and not self._is_over_for(name):
                self._failed_at = time.time()
                return name
            if name == self._roles[0].name:
                self._deadline_s = loop.time() + SAVE_GRACE_S
                loop.call_later(KILL_GRACE_S, self._dismiss)
            else:
                self._left_at[name] = loop.time()
        return None

    def _is_over_for(self, name: str) -> bool:
        """True for a process that nobody needs any more, however it ended: the orchestrator has ended before it, and it has nothing to
        save. It may have been killed because it was to be replaced."""
        has_nothing_to_save = any(role.has_nothing_to_save for role in self._roles if role.name == name)
        was_killed = (self._processes[name].returncode or 0) < 0
        return name in self._dismissed or (self._deadline_s is not None and has_nothing_to_save and was_killed)

    async def _oversee(self) -> None:
        """Kill what stands still, so that it is started again. A process that was stopped tells nobody, so this looks."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for path, peer, process_id in asked_to_replace(self._run_folder):
                if not self._is_of(peer, process_id):  # gone already, or not who it says
                    continue
                path.unlink(missing_ok=True)
                self._note(f"{peer} (process {process_id}) is to be replaced; killing it")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
            self._end_stopped()
            self._hold_on()
            await self._call_back()

    def _hold_on(self) -> None:
        """Renew the lease; where it was lost, end all at once: nothing they would still write may be written."""
        if self._lease is None or self._lost is not None:
            return
        try:
            self._lease.renew_if_due()
        except LeaseError as error:
            self._lost = error
            self._signal_all(signal.SIGKILL)

    def _is_ours(self, process_id: int) -> bool:
        """True where a process is one of this launcher's, or descends from one: no other is ever signalled."""
        ours = {process.pid for process in self._processes.values() if process.returncode is None}
        return not ours.isdisjoint(ancestors(process_id))

    def _is_of(self, peer: str, process_id: int) -> bool:
        """True where a process is one of this launcher's, started for peers of that kind: no other is killed for what a peer says."""
        kind = peer.partition("-")[0]
        names = {peer} if kind == "scorer" else {role.name for role in self._roles if role.name.partition("-")[0].removesuffix("s") == kind}
        ours = {process.pid for name, process in self._processes.items() if name in names and process.returncode is None}
        return not ours.isdisjoint(ancestors(process_id))

    async def _call_back(self) -> None:
        """Start again who was told to end by an orchestrator that was killed before it ended itself."""
        if self._deadline_s is not None or self._num_interrupts or self._roles[0].name != "orchestrator":
            return
        for role in self._roles:
            if asyncio.get_running_loop().time() - self._left_at.get(role.name, float("inf")) > REJOIN_AFTER_S:
                del self._left_at[role.name]
                self._note(f"{role.name} was told to end by an orchestrator that is gone; starting it again")
                await self._start(role)

    def _end_stopped(self) -> None:
        """Kill whichever process of the run was stopped by a signal for too long: one that is only starting is missed by nobody else."""
        now_s = time.time()
        stopped = [process_id for process_id in stopped_processes() if self._is_ours(process_id)]
        self._stopped_since = {process_id: self._stopped_since.get(process_id, now_s) for process_id in stopped}
        for process_id, since_s in self._stopped_since.items():
            if now_s - since_s > self._stopped_limit_s:
                self._note(f"process {process_id} was stopped for {self._stopped_limit_s:g} s; killing it")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)

    def _dismiss(self) -> None:
        """End those that still run and have nothing to save."""
        for role in self._roles:
            if role.has_nothing_to_save and self._processes[role.name].returncode is None:
                self._dismissed.add(role.name)
                self._signal(role.name, signal.SIGTERM)

    def _interrupt(self, number: signal.Signals) -> None:
        """First: have the orchestrator end the run, which saves and, after Ctrl-C, evaluates. Second: end everything at once."""
        self._num_interrupts += 1
        orchestrator = self._processes.get("orchestrator")
        if self._num_interrupts == 1 and orchestrator is not None and orchestrator.returncode is None:
            orchestrator.send_signal(number)
        else:
            self._signal_all(signal.SIGKILL)

    async def _end_all(self) -> None:
        await self._end_processes()
        unlink_buffers(run_token(self._run_folder))

    async def _end_processes(self) -> None:
        self._signal_all(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_GRACE_S):
                for process in self._processes.values():
                    await process.wait()
        self._signal_all(signal.SIGKILL, even_ended=True)
        for process in self._processes.values():
            await process.wait()

    def _signal(self, name: str, number: signal.Signals) -> None:
        """Signal the whole group of a process, also one that has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._processes[name].pid, number)

    def _signal_all(self, number: signal.Signals, *, even_ended: bool = False) -> None:
        """Signal every process with its whole group; `even_ended`: also what a process that ended has left behind in its group."""
        for name, process in self._processes.items():
            if process.returncode is None or even_ended:
                self._signal(name, number)

    def _failures(self, pattern: str = "*.json") -> list[dict[str, Any]]:
        """What processes recorded of their ends; half a record, as of a full disk, is none."""
        found: list[dict[str, Any]] = []
        for path in (self._run_folder / "failures").glob(pattern):
            with contextlib.suppress(ValueError):
                found.append(json.loads(path.read_text()))
        return found

    def _explain(self, failed: str) -> str:
        """The first error any process recorded; else how the failed one ended, with the end of its log."""
        log = self._run_folder / "logs" / f"{failed}.log"
        records = [record for record in self._failures() if record["t"] <= self._failed_at]
        if records:
            first = min(records, key=lambda record: record["t"])
            return f"{first['process']} failed: {first['error']}\n(its traceback is in {self._run_folder / 'failures'})"
        if self._is_overdue:
            return f"{failed} had not ended {SAVE_GRACE_S:g} s after the orchestrator, and was killed; its log is {log}"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        spent = f" after {count} restarts" if (count := self._restarts[failed].count) else ""
        return f"{failed} {self._how_it_ended(failed)}{spent}; its log {log} ends:\n{tail}"

    def _how_it_ended(self, name: str) -> str:
        code = self._processes[name].returncode
        if code == UNWRITTEN:
            return f"ended and could not write why to {self._run_folder}: make room on the disk, and resume the run"
        return f"was killed by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with exit code {code}"
