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
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pipelinerl.errors import ConfigError, LeaseError, PeerGone
from pipelinerl.launch import processes
from pipelinerl.launch.processes import Processes
from pipelinerl.launch.roles import TRAINER, Role
from pipelinerl.launch.run_folder import forget_endpoints
from pipelinerl.launch.trainer_starts import TrainerStarts
from pipelinerl.runtime.early import EarlyProcesses
from pipelinerl.runtime.lease import EPOCH, Lease
from pipelinerl.runtime.membership import Gone, Kind, Member, ScaleFolder, StartedBy, State
from pipelinerl.runtime.process import asked_to_replace, note, registered, stopped_processes
from pipelinerl.runtime.restarts import Restarts
from pipelinerl.runtime.trainer_ranks import Phase
from pipelinerl.weights.shared_names import run_token, sweep, unlink_buffers

SAVE_GRACE_S = 60.0
"""Seconds that processes may take to save and end once the orchestrator has ended. Shorter cuts off large models being written."""
LOOK_EVERY_S = 1.0
"""Seconds between two looks for processes that stand still."""


class Launcher:
    """Runs the processes of one run to their end."""

    def __init__(
        self,
        roles: tuple[Role, ...],
        run_folder: Path,
        *,
        restarts: Restarts | None = None,
        stopped_limit_s: float = float("inf"),
        lease: Lease | None = None,
        early: EarlyProcesses | None = None,
        is_orchestrator: bool = False,
        joined: Callable[[str, Member, Iterable[Role]], Role | None] | None = None,
        trainers: TrainerStarts | None = None,
    ) -> None:
        """`joined` makes the role of an engine that joins, on what the other roles leave of this machine; None where none join here. It
        returns None where another process starts what joins.
        `trainers` says which trainer is started; None where it is always the one of `roles`.

        `lease` is this process's hold on the folder, which it renews; the run ends at once where another launcher has taken over.
        `early`: processes that have begun already, each of which becomes the first one of its role.

        A process that is stopped (SIGSTOP) for `stopped_limit_s` is killed: nobody else would notice before long that the orchestrator
        stands still, or a process that is only starting.

        `is_orchestrator`: the orchestrator is this process, which hears signals itself, and says by `orchestrator_ended` that it is over.
        """
        self._roles = {role.name: role for role in roles}
        self._is_orchestrator = is_orchestrator
        self._first = "orchestrator" if is_orchestrator else roles[0].name
        """The process whose end is the end of the run: the orchestrator, or on another node the first of its processes."""
        self._run_folder = run_folder
        self._joined = joined
        self._trainers = trainers
        self._scale = ScaleFolder(run_folder)
        self._begun: set[tuple[str, int, int]] = set()
        """(kind, engine, request) of those that have joined."""
        self._lease = lease
        self._lost: LeaseError | None = None
        """Why the folder is not this launcher's any more."""
        self._restarts = restarts or Restarts(budget=0, first_wait_s=0.0)
        self._stopped_limit_s = stopped_limit_s
        self._stopped_since: dict[int, float] = {}
        """By process id, in Unix seconds."""
        self._processes = Processes(run_folder, environment={EPOCH: str(lease.epoch)} if lease else {}, early=early)
        self._running: set[str] = set()
        """Those whose end was not taken from `Processes.ended` yet."""
        self._deadline_s: float | None = None
        """The time by which all must have ended, on the loop's clock; None while the orchestrator lives."""
        self._tasks = asyncio.TaskGroup()
        self._dismissed: set[str] = set()
        """Those that were ended because the run was over."""
        self._num_interrupts = 0
        self._is_cut_off = False
        """A signal has ended everything at once."""
        self._is_overdue = False
        """The run failed because a process did not end, not because one ended badly."""
        self._failed_at = 0.0
        """Unix seconds at which a failure was noticed; what others record after it, they record because they were ended."""

    @property
    def was_interrupted(self) -> bool:
        """Return whether a signal has told this launcher to end."""
        return self._num_interrupts > 0

    async def run(self) -> None:
        """Start everything and wait for the end. Raises `PeerGone` naming the process that failed first, with its own words.

        Raises `LeaseError` where another launcher has taken the folder over.
        """
        loop = asyncio.get_running_loop()
        numbers = () if self._is_orchestrator else (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._interrupt, number)
        try:
            async with self._tasks:
                failed = await self._run_all()
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
        if self._lost is not None:
            raise self._lost
        if failed is not None:
            raise PeerGone(self._explain(failed))

    def orchestrator_ended(self) -> None:
        """Note that the orchestrator, which is this process, is over: the others have `SAVE_GRACE_S` from now on."""
        self._processes.ended.put_nowait(self._first)

    async def _run_all(self) -> str | None:
        """Start, restart and end all; return the name of the process that ended the run badly."""
        if freed := sweep():
            note(self._run_folder, f"removed {freed >> 20} MiB that processes which were killed had left in shared memory")
        overseer = self._tasks.create_task(self._oversee(), name="overseer")
        try:
            self._running.update([self._first] if self._is_orchestrator else [])
            for name in self._roles:
                await self._start(name)
            while (failed := await self._wait()) is not None:
                if (wait_s := self._wait_to_restart(failed)) is not None:
                    await self._restart(failed, wait_s=wait_s)
                elif self._is_dispensable(failed):
                    self._give_up(failed)
                else:
                    break
            return failed
        finally:
            overseer.cancel()
            await self._processes.end_all()
            if any(name.partition("-")[0] == "trainer" for name in self._roles):  # they are its own; on this machine it may live on
                unlink_buffers(run_token(self._run_folder))

    async def _start(self, name: str) -> None:
        if name == TRAINER and self._trainers is not None:
            others = [role for role in self._roles.values() if role.name != name]
            self._roles[name] = self._trainers.role(self._roles[name], others)
        await self._processes.start(self._roles[name], self._tasks)
        self._running.add(name)

    async def _wait(self) -> str | None:
        """Wait until all have ended well, or one has not; its name then. The others may outlive the orchestrator by `SAVE_GRACE_S`."""
        loop = asyncio.get_running_loop()
        while self._running:
            try:
                async with asyncio.timeout_at(self._deadline_s):
                    name = await self._processes.ended.get()
            except TimeoutError:
                self._failed_at, self._is_overdue = time.time(), True
                return min(self._running)
            self._running.discard(name)
            is_process = name in self._roles
            if name == TRAINER and self._trainers is not None and self._is_live() and self._trainers.is_due():
                continue  # however it ended: the next one starts from what it has saved
            if is_process and self._was_ended_unprepared(name):
                return None
            if is_process and self._processes.exit_code(name) and not self._is_over_for(name):
                self._failed_at = time.time()
                return name
            if name == self._first:
                self._deadline_s = loop.time() + SAVE_GRACE_S
                loop.call_later(processes.KILL_GRACE_S, self._dismiss)
            else:
                self._restarts.ended_well(name, now_s=time.time())
        return None

    def _was_ended_unprepared(self, name: str) -> bool:
        """Return whether the orchestrator was still starting when it was asked to save, and so ended by the signal itself: there is nothing
        to save, and `--resume` goes on."""
        was_ended_by_term = self._processes.exit_code(name) == -signal.SIGTERM
        return name == "orchestrator" and self._num_interrupts == 1 and was_ended_by_term

    def _is_over_for(self, name: str) -> bool:
        """Return whether nobody needs a process any more, however it ended: its engines have left, or the orchestrator has ended before it,
        and it has nothing to save. It may have been killed because it was to be replaced."""
        was_killed = (self._processes.exit_code(name) or 0) < 0
        return (
            name in self._dismissed
            or (was_killed and self._has_left(name))
            or (self._deadline_s is not None and self._roles[name].has_nothing_to_save and was_killed)
        )

    def _wait_to_restart(self, failed: str) -> float | None:
        """Seconds until a process that failed may be started again; None where it may not, and the run ends."""
        is_over = self._deadline_s is not None  # whoever starts after the orchestrator has ended would wait for it in vain
        if self._lost or self._num_interrupts or self._is_overdue or is_over or not self._processes.was_killed(failed):
            return None
        return self._restarts.next_wait(failed, now_s=time.time(), started_s=self._processes.started_at[failed])

    async def _restart(self, failed: str, *, wait_s: float) -> None:
        self._processes.put_failures_away()
        how, count = self._processes.how_it_ended(failed), self._restarts.count(failed)
        note(self._run_folder, f"{failed} {how}; starting it again in {wait_s:g} s (restart {count})")
        self._processes.signal(failed, signal.SIGKILL)  # what it left behind in its group
        if failed == "orchestrator":
            forget_endpoints(self._run_folder)
        await asyncio.sleep(wait_s)
        if self._is_live() and failed not in self._running:  # where it is, the trainer of a change has taken its place meanwhile
            await self._start(failed)

    def _explain(self, failed: str) -> str:
        """The first error that any process recorded; else how the failed one ended, with the end of its log."""
        if self._is_cut_off:
            return (
                "the run was ended at once, as a second signal asks, and saved nothing more. `--resume` goes on from the last checkpoint,"
                " with what was generated and scored since"
            )
        if first := self._processes.first_failure(before_s=self._failed_at):
            return first
        if self._is_overdue:
            log = self._run_folder / "logs" / f"{failed}.log"
            return f"{failed} had not ended {SAVE_GRACE_S:g} s after the orchestrator, and was killed; its log is {log}"
        spent = f" after {count} restarts" if (count := self._restarts.count(failed)) else ""
        return f"{failed} {self._processes.how_it_ended(failed)}{spent}; {self._processes.end_of_log(failed)}"

    async def _oversee(self) -> None:
        """Kill what stands still, so that it is started again. A process that was stopped tells nobody, so this looks."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._replace()
            self._kill_stopped()
            self._renew_lease()
            await self._start_dismissed_again()
            await self._start_next_trainer()
            await self._start_joined()

    def _is_live(self) -> bool:
        """Return whether anything is still started: the orchestrator lives, and nobody has told the run to end."""
        return self._deadline_s is None and not self._num_interrupts

    async def _start_next_trainer(self) -> None:
        """Start the trainer of a change once the one before has ended; kill that where it is late."""
        if self._trainers is None or not self._is_live() or not self._trainers.is_due():
            return
        if self._processes.is_running(TRAINER):
            if self._trainers.is_overdue():
                note(self._run_folder, "the trainer has not ended for the one that is to take its place; killing it")
                self._processes.signal(TRAINER, signal.SIGKILL)
        elif TRAINER not in self._running:  # its end is dealt with
            try:
                await self._start(TRAINER)
                note(self._run_folder, f"the trainer starts anew: {self._roles[TRAINER]}")
            except ConfigError as error:
                self._trainers.tell_failed(str(error))

    def _replace(self) -> None:
        """Kill the processes that the orchestrator asks to have replaced."""
        for path, peer, process_id in asked_to_replace(self._run_folder):
            if self._processes.owns(process_id, self._names_of(peer)):  # else it is gone already, or not what it says
                path.unlink(missing_ok=True)
                self._kill(process_id, f"{peer} (process {process_id}) is to be replaced; killing it")

    def _names_of(self, peer: str) -> set[str]:
        """The processes that were started for peers of that kind: no other is killed for what a peer says."""
        kind = peer.partition("-")[0]
        if kind == "scorer":
            return {peer}
        return {name for name in self._roles if name.partition("-")[0].removesuffix("s") == kind}

    def _kill_stopped(self) -> None:
        """Kill each process of the run that was stopped by a signal for too long. Nobody else misses one that is only starting."""
        now_s = time.time()
        stopped = [process_id for process_id in stopped_processes() if self._processes.owns(process_id)]
        self._stopped_since = {process_id: self._stopped_since.get(process_id, now_s) for process_id in stopped}
        for process_id, since_s in self._stopped_since.items():
            if now_s - since_s > self._stopped_limit_s:
                self._kill(process_id, f"process {process_id} was stopped for {self._stopped_limit_s:g} s; killing it")

    def _kill(self, process_id: int, why: str) -> None:
        note(self._run_folder, why)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)

    def _renew_lease(self) -> None:
        """Renew the lease; where it was lost, end all at once: nothing they would still write may be written."""
        if self._lease is None or self._lost is not None:
            return
        try:
            self._lease.renew_if_due()
        except LeaseError as error:
            self._lost = error
            self._processes.signal_all(signal.SIGKILL)

    async def _start_dismissed_again(self) -> None:
        """Start processes again that were told to end by an orchestrator that was killed before it ended itself."""
        if not self._is_live() or self._first != "orchestrator":
            return
        for name in self._restarts.rejoining(now_s=time.time()):
            if self._has_left(name) or self._processes.is_running(name):
                continue
            note(self._run_folder, f"{name} was told to end by an orchestrator that is gone; starting it again")
            await self._start(name)

    async def _start_joined(self) -> None:
        """Start the engines that the orchestrator has let join, and this launcher is to start."""
        if self._joined is None or not self._is_live():
            return
        if (trainer := self._scale.trainer()) is not None and trainer.phase is not Phase.SETTLED:
            return  # they may be meant for what the trainer is to leave
        found = self._scale.members()
        if found is None or (len(found.by_kind()) > 1 and self._scale.with_state(State.DRAINING)):
            return  # an engine of one kind may be meant for what one of another is to leave
        for kind, member in ((kind, member) for kind, record in found.by_kind().items() for member in record.members):
            is_ours = (member.started_by, member.state) == (StartedBy.LAUNCHER, State.JOINING)
            begun = (kind, member.engine_id, member.request_id)
            if not is_ours or begun in self._begun:
                continue
            running = [role for name, role in self._roles.items() if self._processes.is_running(name)]
            try:
                role = self._joined(kind, member, running)
            except ConfigError as error:
                if kind == Kind.ENGINES and found.has_of_another_width(member):  # these have the GPUs, and are to leave
                    if not self._scale.with_state(State.DRAINING):
                        self._scale.tell_no_room(member.engine_id, str(error))
                    continue
                self._begun.add(begun)
                self._tell_gone(kind, {member.engine_id: member.request_id}, str(error))
                continue
            if role is None:
                self._begun.add(begun)
            elif role.name not in self._running and not self._has_process(kind, member.engine_id):  # who had its number has ended
                self._begun.add(begun)
                self._roles[role.name] = role
                note(self._run_folder, f"{role.name} joins the run")
                await self._start(role.name)

    def _has_process(self, kind: str, engine_id: int) -> bool:
        """Return whether an engine of this number still has a process here, which may belong to one of another name."""
        process_id = registered(self._run_folder, f"engine-{engine_id}") if kind == Kind.ENGINES else None
        return process_id is not None and self._processes.owns(process_id)

    def _is_dispensable(self, failed: str) -> bool:
        """Return whether the run goes on without a process that failed: an engine that has joined, or a trainer that is to prove itself."""
        if failed == TRAINER and self._trainers is not None and self._is_live():
            return self._trainers.is_on_trial()
        return self._roles[failed].is_spare and self._first != failed and not self._is_overdue

    def _has_left(self, name: str) -> bool:
        """Return whether all engines of a process have left the run, as they were asked to, or others have their numbers since."""
        role = self._roles[name]
        found = self._scale.members()
        members = () if found is None or (record := found.of(role.kind)) is None else record.members
        gone = {one.engine_id for one in members if one.state is State.LEFT or one.request_id != role.requests.get(one.engine_id)}
        return bool(role.engine_ids) and gone.issuperset(role.engine_ids)

    def _give_up(self, failed: str) -> None:
        """Go on without engines that have joined and failed, or with the trainer of before: whose place it was to take says why."""
        self._failed_at = time.time()
        reason = self._explain(failed)
        self._processes.put_failures_away()
        if failed == TRAINER and self._trainers is not None:
            self._trainers.tell_failed(reason)
        else:
            role = self._roles[failed]
            self._tell_gone(role.kind, role.requests, reason.partition("\n")[0])

    def _tell_gone(self, kind: str, requests: dict[int, int], reason: str) -> None:
        """Leave word that engines, by number with the request that brought each, will not serve any more."""
        note(self._run_folder, f"the run goes on without {kind} {', '.join(map(str, requests))}: {reason}")
        for engine_id, request_id in requests.items():
            self._scale.tell_gone(Gone(kind=kind, engine_id=engine_id, request_id=request_id, reason=reason))

    def _dismiss(self) -> None:
        """End those that still run and have nothing to save."""
        for name, role in self._roles.items():
            if role.has_nothing_to_save and self._processes.is_running(name):
                self._dismissed.add(name)
                self._processes.signal(name, signal.SIGTERM)

    def _interrupt(self, number: signal.Signals) -> None:
        """First: have the orchestrator end the run, which saves and, after Ctrl-C, evaluates. Second: end everything at once."""
        self._num_interrupts += 1
        if self._num_interrupts == 1 and self._processes.is_running("orchestrator"):
            self._processes.interrupt("orchestrator", number)
        else:
            self._is_cut_off = True
            self._processes.signal_all(signal.SIGKILL)
