"""The attempts of rollouts that engines are asked for: their requests, the turns of episodes, and what begins again.

An attempt is one completion, or an episode of several turns, which an environment replies to. `recovery.reissue` repeats what was lost with
an engine; an episode whose environment was lost begins again here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Sequence

import msgspec

from orchestrator.ledger.ledger import Ledger
from orchestrator.peers.engines import Engines
from orchestrator.recovery.reissue import Reissue
from orchestrator.rollouts.rollout import LOST_ENVIRONMENT, Rollout, unanswered
from orchestrator.rules.admission import Admission
from orchestrator.rules.dispatch import Dispatch, Serving
from orchestrator.rules.group_cut import GroupCut
from orchestrator.rules.quarantine import Quarantine
from orchestrator.rules.validation.violations import Violation
from orchestrator.stages.environment import EnvironmentStage
from pipelinerl.messages import Completion, EngineLoad, Finish, Generate, Result, Sampling, Trajectory
from pipelinerl.runtime.stage import Signal
from pipelinerl.runtime.watch import Watch


@dataclasses.dataclass(slots=True, kw_only=True)
class EngineAttempts:
    """The attempts that engines have, or that wait for one; a part of the stage `generation`, as `AgentTurns` is of `leasing`."""

    engines: Engines
    environment: EnvironmentStage | None
    ledger: Ledger
    credits: Signal
    watch: Watch
    sampling: Sampling
    chunk_tokens: int
    quarantine: Quarantine
    admission: Admission
    dispatch: Dispatch[Rollout] | None
    group_cut: GroupCut | None
    full: Callable[[], str | None]
    """The callback names the queue that has to get shorter before anything more is asked of engines."""
    then: Callable[[Trajectory], None]
    """The callback for each trajectory."""
    _reissue: Reissue = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._reissue = Reissue(
            engines=self.engines,
            quarantine=self.quarantine,
            ledger=self.ledger,
            credits=self.credits,
            watch=self.watch,
            attempts=self,
            may_move=self.may_move,
        )
        if self.dispatch is not None:
            self.engines.on_load(self._reported)
            self.engines.on_died(self.dispatch.lost)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._reissue.run())
            if self.dispatch is not None:
                group.create_task(self._send(self.dispatch))

    def start_group(self, rollouts: Sequence[Rollout], engine_id: int) -> None:
        """Have the siblings of a new group played, at once by this engine, or one by one as `dispatch` says."""
        waiting: list[Rollout] = []
        for rollout in rollouts:
            if rollout.is_stateful:
                self.start(rollout)
            elif self.dispatch is not None:
                waiting.append(rollout)
            else:
                self.ask(rollout, engine_id)
        if self.dispatch is not None:
            first = rollouts[0]
            self.dispatch.add(first.group_id, waiting, num_prompt=len(first.prompt.token_ids), version=first.version)
            self.credits.set()

    def start(self, rollout: Rollout) -> None:
        """Have a rollout issued as soon as an engine may take it; one whose environment has state once that stands."""
        if self.environment is not None and rollout.is_stateful:
            self.environment.ask(rollout, engine_id=-1, then=functools.partial(self._started, rollout))
        else:
            self._reissue.put(rollout)

    def ask(self, rollout: Rollout, engine_id: int) -> None:
        if rollout.is_new:
            version = self.engines[engine_id].version
            self.ledger.issue(rollout.rollout_id, attempt=rollout.attempt, engine_id=engine_id, version=version, now_s=_now_s())
        self._reissue.enter(rollout, engine_id)
        if self.dispatch is not None:
            num_prompt = len(rollout.prompt.token_ids)
            self.dispatch.sent(rollout.rollout_id, group_id=rollout.group_id, num_prompt=num_prompt, engine_id=engine_id)
        self.engines.requests.ask(
            self.request(rollout),
            engine_id,
            sink=lambda completion, engine_id: self.take(rollout, completion, engine_id),
            lost=lambda engine_id: self._lost(rollout, engine_id),
            refused=lambda engine_id, violation: self._refused(rollout, engine_id, violation),
            moved=functools.partial(self._moved, rollout) if self.may_move(rollout) else None,
        )

    def request(self, rollout: Rollout) -> Generate:
        sampling = msgspec.structs.replace(self.sampling, temperature=0.0) if rollout.is_greedy else self.sampling
        return rollout.request(sampling, chunk_tokens=self.chunk_tokens)

    def take(self, rollout: Rollout, completion: Completion, engine_id: int) -> None:
        completion = rollout.joined(completion)
        is_whole = completion.finish in (Finish.STOP, Finish.LENGTH)
        self._ended(rollout, engine_id, num_tokens=len(completion.token_ids) if is_whole else None)
        if self.group_cut is not None:
            self._cut(rollout, self.group_cut)
        rollout = rollout.said(completion)
        if self.environment is None or rollout.is_over:
            self._end(rollout, completion, engine_id)
        else:
            self.environment.ask(rollout, engine_id=engine_id, then=functools.partial(self._go_on, rollout, completion, engine_id))

    def finish(self, rollout: Rollout, completion: Completion, engine_id: int) -> None:
        """Pass an answer on."""
        if self.environment is not None:
            self.environment.end(rollout.rollout_id)
        self.then(rollout.trajectory(completion, engine_id=engine_id, finished_at=_now_s()))

    def may_move(self, rollout: Rollout) -> bool:
        """Return whether a rollout may go on in another engine with its tokens: nobody follows it while it is written, decides about the
        attempt that it is, or constrains what it says.
        """
        return rollout.episode is None and self.group_cut is None and not (self.chunk_tokens or self.sampling.structured_outputs)

    async def _send(self, dispatch: Dispatch[Rollout]) -> None:
        """Send rollouts to engines, in the order and to the engines that `dispatch` says."""
        while True:
            while self.full() is None and (found := dispatch.next(self._serving(), max_running=self.admission.max_running)) is not None:
                self.ask(*found)
            await self.credits.wait()

    def _serving(self) -> list[Serving]:
        return [
            Serving(engine_id=engine.engine_id, version=engine.version, num_outstanding=engine.num_outstanding)
            for engine in self.engines.serving()
        ]

    def _reported(self, load: EngineLoad) -> None:
        assert self.dispatch is not None
        self.dispatch.reported(
            load.engine_id, num_passes=load.num_steps, kv_used=load.kv_used, num_running=load.num_running, num_queued=load.num_waiting
        )
        self.credits.set()

    def _moved(self, rollout: Rollout, completion: Completion, engine_id: int, target: int | None) -> None:
        self._ended(rollout, engine_id, num_tokens=None)
        self._reissue.move(rollout, completion, engine_id, target)

    def _lost(self, rollout: Rollout, engine_id: int) -> None:
        self._ended(rollout, engine_id, num_tokens=None)
        self._reissue.lose(rollout, engine_id)

    def _refused(self, rollout: Rollout, engine_id: int, violation: Violation) -> None:
        self._ended(rollout, engine_id, num_tokens=None)
        self._reissue.refuse(rollout, engine_id, violation)

    def _ended(self, rollout: Rollout, engine_id: int, *, num_tokens: int | None) -> None:
        if self.dispatch is not None:
            self.dispatch.ended(rollout.rollout_id, engine_id=engine_id, num_tokens=num_tokens)

    def _cut(self, rollout: Rollout, group_cut: GroupCut) -> None:
        """Toss coins for the siblings of a rollout that engines still write, where enough of them have ended."""
        stopped: list[tuple[str, int]] = []
        for sibling in group_cut.ended(rollout.group_id, rollout.sibling):
            name = f"{rollout.group_id}/{sibling}"
            attempt = self.engines.requests.attempt_of(name)
            if attempt is None:
                continue
            decision = group_cut.decide(name, attempt)
            self.ledger.record_early_stop(name, attempt=attempt, decision=decision, now_s=_now_s())
            if decision.stops:
                stopped.append((name, attempt))
        if stopped:
            self.ledger.flush()  # before an engine hears of it: a later process must not toss again
        for name, attempt in stopped:
            self.engines.requests.withdraw(name, attempt)

    def _started(self, rollout: Rollout, result: Result) -> None:
        if result.is_lost and rollout.may_restart:
            self.start(rollout.restarted())
            return
        rollout = rollout.observe(result)
        if rollout.is_over:
            self.finish(rollout, unanswered(rollout.rollout_id, attempt=rollout.attempt, error=result.error), -1)
        else:
            self._reissue.put(rollout)
        self.credits.set()

    def _go_on(self, rollout: Rollout, completion: Completion, engine_id: int, result: Result) -> None:
        """Ask for an episode's next turn. The engine of the last turn is asked where it may go on: its prefix cache may hold all before."""
        reissue = self._reissue
        if result.is_lost and rollout.may_restart:
            reissue.leave(rollout)
            self.ledger.lose(rollout.rollout_id, attempt=rollout.attempt, engine_id=engine_id, reason=LOST_ENVIRONMENT, now_s=_now_s())
            self.start(dataclasses.replace(rollout.restarted(), attempt=rollout.attempt + 1, reason=LOST_ENVIRONMENT))
            return
        rollout = rollout.observe(result)
        if rollout.is_over:
            self._end(rollout, completion, engine_id)
        elif self.engines.takes_work(engine_id) and reissue.may_take(engine_id, rollout) and not reissue.is_quarantined(rollout):
            self.ask(rollout, engine_id)
        else:
            reissue.leave(rollout)
            reissue.put(rollout)
        self.credits.set()

    def _end(self, rollout: Rollout, completion: Completion, engine_id: int) -> None:
        self._reissue.end(rollout, engine_id)
        self.finish(rollout, completion, engine_id)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
