"""Beside the stages of every run: engines join and leave while it goes on, those of the process reward model too, and processes of
reward models, and the trainer gets other ranks (`pipelinerl scale`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from typing import Any

import msgspec

from orchestrator.peers.adaptive_concurrency import RunningLimit
from orchestrator.peers.engines import Engine, Engines
from orchestrator.peers.prm import Prm, PrmEngine
from orchestrator.peers.reward_model import ModelProcess, RewardModel
from orchestrator.rules.engine_widths import EngineWidths
from orchestrator.rules.membership import Membership
from orchestrator.stages.role_changes import RoleChanges
from orchestrator.stages.trainer_restart import TrainerRestart
from pipelinerl.errors import ConfigError, PeerGone
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.membership import Kind, ScaleFolder, ScaleRequest, State, is_reward
from pipelinerl.runtime.stage import Signal
from pipelinerl.runtime.trainer_ranks import Phase

Part = Engines | Prm | RewardModel
"""What has members that join and leave."""
MOVE_S = 30.0
"""Seconds in which an engine that leaves has to end its sequences so that they move: a pass and a swap, no more. What takes longer begins
anew.
"""
LOOK_EVERY_S = 0.5
"""Seconds between two looks at what is asked for: a file, which may have been written on another machine, tells nobody that it is there."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Scaling:
    """Carries out what `rules.membership` and `rules.engine_widths` decide. An engine that is to leave gets no new work and ends what it
    has; what it has not ended after the time that was given to it goes on in others, with its tokens where it can move
    (`EngineAttempts.may_move`), else from its prompt. Whichever way, it is then told to end, and no rollout of it is lost. An engine of the
    process reward model gets no new traces; what it has not ended in time begins anew in others. A process of a reward model is ended by
    its scorer, which asks others for what it had.

    takes     ScaleRequest and the word of those who start engines that some are gone, as files; orders of elastic roles, where they are on
    gives     Members and TrainerRanks, as files, which those who start processes read; Stop, to engines that leave
    waits for an engine that leaves to answer what it has, for as long as the request allows; the trainer (`stages.trainer_restart`)
    woken by  engines that answer, the trainer, and the clock
    fails     PeerGone, where the last engine does not start any more; PeerSilent, where no trainer does after a change of its ranks. A
              request that cannot be carried out is answered with the reason, a damaged file is named once in the journal
    ends      cancelled, when the run ends
    """

    name = "scaling"
    folder: ScaleFolder
    membership: Membership
    engines: Engines
    prm: Prm | None
    """None in a run without a process reward model."""
    rewards: tuple[RewardModel, ...] = ()
    limit: RunningLimit
    credits: Signal
    """Set with every answer of an engine."""
    journal: Journal
    trainer: TrainerRestart
    roles: RoleChanges | None = None
    """What asks by itself, besides those who ask by file; None where nothing does."""
    ready_s: float = math.inf
    """Seconds in which engines of another width that the launcher starts have to come, before the run has those of before again."""
    _widths: EngineWidths = dataclasses.field(init=False)
    _awaited: set[int] = dataclasses.field(default_factory=set, init=False)
    """Engines of another width that have not come."""
    _awaited_since_s: float = dataclasses.field(default=0.0, init=False)
    _tasks: asyncio.TaskGroup | None = dataclasses.field(default=None, init=False)
    """What changes that take a while run in; None before the stage runs."""
    _damage: str = dataclasses.field(default="", init=False)
    """What was said last of a damaged file, which stays as it is."""

    def __post_init__(self) -> None:
        self._widths = EngineWidths(self.membership)

    async def run(self) -> None:
        self._publish()
        self.trainer.tell()
        async with asyncio.TaskGroup() as self._tasks:
            tasks = self._tasks
            if self.trainer.change.record.phase is Phase.STARTING:  # an orchestrator that is gone had asked for it
                tasks.create_task(self._until_started(tasks))
            else:
                self._take_engines_back(tasks)
            while True:
                self._look(tasks)
                await asyncio.sleep(LOOK_EVERY_S)

    async def reallocate(self, *, engines: int, drain_s: float, ready_s: float) -> str:
        """Bring the run to a number of engines, as a request by file would, and wait until those that join serve and those that leave have
        left. Return why that cannot be, or what is still missing after the time that both may take; empty where it has happened.
        """
        assert self._tasks is not None, "calls come once the run has its peers"
        number = 1 + self.membership.record().request_id
        self._scale(ScaleRequest(request_id=number, engines=engines, drain_s=drain_s), self._tasks)
        self._tell()
        if refused := self.membership.record().refused:
            return refused
        deadline_s = ready_s + drain_s + MOVE_S
        try:
            async with asyncio.timeout(deadline_s):
                while (missing := self.membership.missing()) and self.membership.num_wanted == engines:
                    if lost := [one for one in missing if one.state is State.LOST]:
                        return f"engine-{lost[0].engine_id} was lost before it served: {lost[0].reason}"
                    await self.engines.changed.wait()
        except TimeoutError:
            words = ", ".join(f"engine-{one.engine_id} ({one.state})" for one in self.membership.missing())
            return f"waited {deadline_s:g} s for {words}; see logs/engines*.log in the run's folder"
        if self.membership.num_wanted != engines:
            return f"engines={self.membership.num_wanted} was asked for by somebody else meanwhile"
        return ""

    def _look(self, tasks: asyncio.TaskGroup) -> None:
        try:
            parts = {part.membership.kind: part for part in self._parts}
            for gone in self.folder.take_gone():
                if (part := parts.get(gone.kind)) is not None and part.membership.is_meant(gone.engine_id, request_id=gone.request_id):
                    part.lost(gone.engine_id, gone.reason)
                    self._check_last(part.membership, gone.engine_id, gone.reason)
            self._follow_width(tasks)
            self.trainer.look()
            self._carry_out(tasks)
            self._follow_roles(self.roles, tasks)
        except ConfigError as error:  # a damaged file is nobody's wish
            if str(error) != self._damage:
                self._damage = str(error)
                self.journal.write("scale", refused=self._damage)
        self._tell()

    def _check_last(self, membership: Membership, engine_id: int, reason: str) -> None:
        """End the run where nobody is left to take the place of an engine that does not start. Raises `PeerGone` with its words."""
        if membership.is_last(engine_id):
            raise PeerGone(f"{membership.kind} {engine_id}, the last of the run, will not serve any more: {reason}")

    def _carry_out(self, tasks: asyncio.TaskGroup) -> None:
        if (asked := self.folder.asked(after=self.membership.record().request_id)) is not None:
            self._scale(asked, tasks)

    def _follow_roles(self, roles: RoleChanges | None, tasks: asyncio.TaskGroup) -> None:
        """Carry out what the rule of elastic roles orders, as if somebody had asked for it."""
        if roles is None or (orders := roles.look()) is None:
            return
        number = 1 + self.membership.record().request_id  # who asks by file takes the time for a number, which is larger
        prm = orders.scorers if orders.scored_by == Kind.PRM else None
        rewards = {orders.scored_by: orders.scorers} if is_reward(orders.scored_by) else {}
        others: dict[str, Any] = {"prm": prm, "rewards": rewards, "trainer": orders.trainer}
        if (size := orders.tensor_parallel_size) != self.membership.tensor_parallel_size:
            others = {"tensor_parallel_size": size}  # no order changes both
        request = ScaleRequest(request_id=number, engines=orders.engines, drain_s=roles.drain_s, **others)
        self._scale(request, tasks, keeps_places=True)  # where it is refused, the next look sees that nothing of it was carried out

    def _scale(self, asked: ScaleRequest, tasks: asyncio.TaskGroup, *, keeps_places: bool = False) -> None:
        """Have engines join or leave, and the trainer change, or refuse all of the request. See `Membership.scale` of `keeps_places`."""
        change, parts = self.trainer.change, {part.membership.kind: part for part in self._parts}
        numbers = {kind: number for kind in parts if (number := asked.number_of(kind)) is not None}
        before = {kind: parts[kind].membership.num_wanted for kind in numbers}
        ranks = asked.trainer if asked.trainer != change.record.wanted else None
        why_not = self._why_not_scorers(asked) or (None if ranks is None else change.why_not(ranks)) or self._why_not_together(asked)
        leaving: dict[Part, list[int]] = {self.engines: self.membership.scale(asked, refused=why_not, keeps_places=keeps_places)}
        record = self.membership.record()
        leaving |= {part: part.membership.scale(asked) for part in self._parts[1:] if not record.refused}
        self.journal.write(
            "scale",
            engines=asked.engines,
            prm=asked.prm,
            rewards=asked.rewards,
            trainer=asked.trainer,
            tensor_parallel_size=asked.tensor_parallel_size,
            drain_s=asked.drain_s,
            started_by=asked.started_by,
            refused=record.refused,
        )
        if ranks is not None and not record.refused:  # before engines that join are told of: they may be meant for what the trainer leaves
            self.trainer.begin(ranks, engines_before=before)
            tasks.create_task(self._change_trainer(tasks))
        elif not record.refused:
            self.trainer.keep_engines([kind for kind, number in numbers.items() if number != change.record.engines_before.get(kind)])
        for part, engine_ids in leaving.items():
            self._have_leave(part, engine_ids, asked, tasks)
        self._publish()

    def _have_leave(self, part: Part, engine_ids: list[int], asked: ScaleRequest, tasks: asyncio.TaskGroup) -> None:
        """Have engines of one kind leave, and those that are to stay after all go on."""
        membership = part.membership
        for engine in list(part):
            if engine.leaves_for and membership.state(engine.engine_id) is State.LIVE:
                part.leave(engine.engine_id, "")
        reason = f"{membership.kind}={asked.number_of(membership.kind)} was asked for"
        self._drain_all(part, engine_ids, reason, asked.drain_s, tasks)
        for member in membership.record().members:  # those that have not come are not waited for
            if member.state is State.LEFT and part.find(member.engine_id) is not None:
                part.dismiss(member.engine_id, member.reason)

    def _drain_all(self, part: Part, engine_ids: list[int], reason: str, drain_s: float, tasks: asyncio.TaskGroup) -> None:
        for engine_id in engine_ids:
            if (engine := part.find(engine_id)) is not None:
                part.leave(engine_id, reason)
                tasks.create_task(self._drain(part, engine, drain_s=drain_s))

    def _follow_width(self, tasks: asyncio.TaskGroup) -> None:
        """Have engines of another width leave once those that were asked for serve, or need their GPUs; have them back where none does."""
        membership, now_s = self.membership, asyncio.get_running_loop().time()
        before = membership.before
        self._tell()  # who has come, before who leaves for them
        awaited = self._widths.awaited()
        if awaited != self._awaited or membership.is_draining():  # they may wait for what others are to leave
            self._awaited, self._awaited_since_s = awaited, now_s
        elif now_s - self._awaited_since_s > self.ready_s:
            for engine_id in awaited:
                self.engines.lost(engine_id, f"it has not come within {self.ready_s:g} s")
        leaving = [*self._widths.replace(), *(one for short in self.folder.take_no_room() for one in self._widths.make_room(short))]
        if self._widths.has_failed:
            self._scale(self._widths.go_back(), tasks)
            membership.before = None  # there is nothing else to go back to
        elif leaving:
            self._drain_all(self.engines, leaving, self._widths.reason, membership.drain_s, tasks)
        if membership.before != before:
            self._publish()

    async def _change_trainer(self, tasks: asyncio.TaskGroup) -> None:
        """Change the trainer's ranks once engines that leave have left."""
        while any(part.membership.is_draining() for part in self._parts):  # each is given up after its own deadline
            await self.credits.wait()
        if not await self.trainer.carry_out():
            self._take_engines_back(tasks)

    async def _until_started(self, tasks: asyncio.TaskGroup) -> None:
        if not await self.trainer.until_started():
            self._take_engines_back(tasks)

    def _take_engines_back(self, tasks: asyncio.TaskGroup) -> None:
        """Where the trainer's change was given up, have as many engines as before, unless somebody has asked for another number since. An
        orchestrator that is gone may have had no time to."""
        if not (back := self.trainer.change.engines_back):
            return
        newest = self.membership.record().request_id
        rewards = {kind: number for kind, number in back.items() if is_reward(kind)}
        request = ScaleRequest(request_id=newest + 1, engines=back.get(Kind.ENGINES), prm=back.get(Kind.PRM), rewards=rewards)
        self._scale(request, tasks, keeps_places=True)
        self.trainer.keep_engines(list(back))
        self._tell()

    def _why_not_scorers(self, asked: ScaleRequest) -> str | None:
        """Say why models that score cannot have what is asked for; None where they can."""
        if asked.prm is not None and self.prm is None:
            return f"prm={asked.prm}: this run has no process reward model"
        if unknown := asked.rewards.keys() - {part.membership.kind for part in self.rewards}:
            return f"{min(unknown)}={asked.rewards[min(unknown)]}: this run has no such reward model"
        found = ((part.membership, asked.number_of(part.membership.kind)) for part in self._parts[1:])
        return next((why for one, number in found if number is not None and (why := one.why_not(number)) is not None), None)

    def _why_not_together(self, asked: ScaleRequest) -> str | None:
        """Say why engines of another width cannot come while something else changes, nor the other way round: either may need what the
        other is to leave. None where nothing is in the way."""
        change, membership = self.trainer.change, self.membership
        has_others = asked.prm is not None or bool(asked.rewards) or asked.trainer not in (None, change.record.wanted)
        if asked.tensor_parallel_size not in (None, membership.tensor_parallel_size):
            if has_others:
                return f"tensor_parallel_size={asked.tensor_parallel_size}: ask for prm=, reward= and trainer= before or after it"
            if change.record.phase is not Phase.SETTLED:
                return f"tensor_parallel_size={asked.tensor_parallel_size}: the trainer changes its ranks; ask again once it has"
        elif has_others and self._widths.is_changing:
            size = membership.tensor_parallel_size
            return f"engines get tensor_parallel_size={size}; ask for prm=, reward= and trainer= again once they have"
        return None

    async def _drain(self, part: Part, engine: Engine | PrmEngine | ModelProcess, *, drain_s: float) -> None:
        def is_leaving() -> bool:
            return part.serves(engine) and part.membership.state(engine.engine_id) is State.DRAINING

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while engine.is_busy and is_leaving():
                    await self.credits.wait()
        held = engine.num_outstanding
        if isinstance(engine, Engine) and is_leaving():
            await self._move(engine)
        if not is_leaving():  # it has ended by itself, or stays
            return
        again = engine.num_outstanding
        how = f"it has ended all that it had after {drain_s:g} s but {held} rollouts" if held else "it has ended all that it had"
        how += f", {held - again} of which go on in others with their tokens" if held > again else ""
        how += f", {again} of which are asked of others anew" if again else ""
        part.membership.left(engine.engine_id, how)
        part.dismiss(engine.engine_id, how)
        self._tell()
        self.credits.set()

    async def _move(self, engine: Engine) -> None:
        """Have what the engine has go on in others, as far as it can."""
        requests = self.engines.requests
        requests.move_all(engine.engine_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOVE_S):
                while requests.num_moving(engine.engine_id) and self._is_leaving(engine):
                    await self.credits.wait()

    def _is_leaving(self, engine: Engine) -> bool:
        return self.engines.serves(engine) and self.membership.state(engine.engine_id) is State.DRAINING

    @property
    def _parts(self) -> tuple[Part, ...]:
        return (self.engines, *([] if self.prm is None else [self.prm]), *self.rewards)

    def _tell(self) -> None:
        """Say in the journal and in the folder what has changed."""
        news = [(part.membership.kind, one) for part in self._parts for one in part.membership.take_news()]
        if not news:
            return
        for kind, one in news:
            self.journal.write(
                "member",
                engine_id=one.engine_id,
                of=kind,
                state=one.state,
                started_by=one.started_by,
                reason=one.reason,
                tensor_parallel_size=one.tensor_parallel_size,
            )
        self._publish()
        for part in self._parts:
            part.changed.set()
        self.limit.resize(self.membership.num_serving())

    def _publish(self) -> None:
        prm = None if self.prm is None else self.prm.membership.record()
        rewards = {part.membership.kind: part.membership.record() for part in self.rewards}
        self.folder.publish(msgspec.structs.replace(self.membership.record(), prm=prm, rewards=rewards))
