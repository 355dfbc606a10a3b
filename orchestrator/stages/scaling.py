"""Beside the stages of every run: engines join and leave while it goes on, as `pipelinerl scale` asks for."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from orchestrator.peers.adaptive_concurrency import RunningLimit
from orchestrator.peers.engines import Engine, Engines
from orchestrator.rules.membership import Membership
from pipelinerl.errors import ConfigError
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.membership import ScaleFolder, State
from pipelinerl.runtime.stage import Signal

MOVE_S = 30.0
"""Seconds in which an engine that leaves has to end its sequences so that they move: a pass and a swap, no more. What takes longer begins
anew.
"""
LOOK_EVERY_S = 0.5
"""Seconds between two looks at what is asked for: a file, which may have been written on another machine, tells nobody that it is there."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Scaling:
    """Carries out what `rules.membership` decides. An engine that is to leave gets no new work and ends what it has; what it has not ended
    after the time that was given to it goes on in others, with its tokens where it can move (`EngineAttempts.may_move`), else from
    its prompt. Whichever way, it is then told to end, and no rollout of it is lost.

    takes     ScaleRequest and the word of those who start engines that some are gone, as files
    gives     Members, as a file, which those who start engines read; Stop, to engines that leave
    waits for an engine that leaves to answer what it has, for as long as the request allows
    woken by  engines that answer, and the clock
    fails     never: a request that cannot be carried out is answered with the reason, a damaged file is named once in the journal
    ends      cancelled, when the run ends
    """

    name = "scaling"
    folder: ScaleFolder
    membership: Membership
    engines: Engines
    limit: RunningLimit
    credits: Signal
    """Set with every answer of an engine."""
    journal: Journal
    _damage: str = dataclasses.field(default="", init=False)
    """What was said last of a damaged file, which stays as it is."""

    async def run(self) -> None:
        self.folder.publish(self.membership.record())
        async with asyncio.TaskGroup() as drains:
            while True:
                self._look(drains)
                await asyncio.sleep(LOOK_EVERY_S)

    def _look(self, drains: asyncio.TaskGroup) -> None:
        try:
            for engine_id, reason in self.folder.take_gone().items():
                self.engines.lost(engine_id, reason)
            self._carry_out(drains)
        except ConfigError as error:  # a damaged file is nobody's wish
            if str(error) != self._damage:
                self._damage = str(error)
                self.journal.write("scale", refused=self._damage)
        self._tell()

    def _carry_out(self, drains: asyncio.TaskGroup) -> None:
        asked = self.folder.asked()
        before = self.membership.record()
        if asked is None or asked.request_id <= before.request_id:
            return
        leaving = self.membership.scale(asked)
        record = self.membership.record()
        self.journal.write("scale", engines=asked.engines, drain_s=asked.drain_s, started_by=asked.started_by, refused=record.refused)
        for engine in list(self.engines):
            if engine.leaves_for and self.membership.state(engine.engine_id) is State.LIVE:  # it stays after all
                self.engines.leave(engine, "")
        for engine_id in leaving:
            if (engine := self.engines.find(engine_id)) is not None:
                self.engines.leave(engine, f"engines={asked.engines} was asked for")
                drains.create_task(self._drain(engine, drain_s=asked.drain_s))
        for member in record.members:  # those that have not come are not waited for
            if member.state is State.LEFT and self.engines.find(member.engine_id) is not None:
                self.engines.dismiss(member.engine_id, member.reason)
        self.folder.publish(record)

    async def _drain(self, engine: Engine, *, drain_s: float) -> None:
        try:
            async with asyncio.timeout(drain_s):
                while engine.num_outstanding and self._is_leaving(engine):
                    await self.credits.wait()
        except TimeoutError:
            pass
        if not self._is_leaving(engine):  # it has ended by itself, or stays
            return
        held = engine.num_outstanding
        await self._move(engine)
        if not self._is_leaving(engine):
            return
        again = engine.num_outstanding
        how = f"it has ended all that it had after {drain_s:g} s but {held} rollouts" if held else "it has ended all that it had"
        how += f", {held - again} of which go on in others with their tokens" if held > again else ""
        how += f", {again} of which are asked of others anew" if again else ""
        self.membership.left(engine.engine_id, how)
        self.engines.dismiss(engine.engine_id, how)
        self._tell()

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

    def _tell(self) -> None:
        """Say in the journal and in the folder what has changed."""
        if not (news := self.membership.take_news()):
            return
        for member in news:
            self.journal.write("member", engine_id=member.engine_id, state=member.state, started_by=member.started_by, reason=member.reason)
        self.folder.publish(self.membership.record())
        self.limit.resize(self.membership.num_serving())
