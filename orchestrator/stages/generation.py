"""Stage 2: prompts become rollouts on engines, and the engines' answers become trajectories."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable

import msgspec

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.snapshot import InterruptedGroup
from orchestrator.peers.engines import Engines
from orchestrator.recovery.reissue import Reissue
from orchestrator.rollouts.rollout import LOST_ENVIRONMENT, Rollout, unanswered
from orchestrator.rules.admission import Admission
from orchestrator.rules.dispatch import Dispatch, Serving
from orchestrator.rules.group_cut import GroupCut
from orchestrator.rules.quarantine import Quarantine
from orchestrator.rules.validation.violations import Violation
from orchestrator.stages.environment import EnvironmentStage
from orchestrator.stages.leasing import Leasing
from orchestrator.stages.prompts import Drawn
from pipelinerl.messages import Completion, EngineLoad, Finish, Generate, Prompt, Result, Sampling, Trajectory
from pipelinerl.runtime.stage import Channel, Signal
from pipelinerl.runtime.watch import Watch

NO_ENGINE = "an engine that takes new work"
"""The reason to wait while every engine is fenced until it holds the newest policy."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Generation:
    """The stage that admits groups while the staleness bound allows it, and collects the engines' answers; `recovery.reissue` repeats lost
    rollouts.

    Once `completions` is full, engines are asked only for the next turns of episodes. Answers to earlier requests still arrive, so it holds
    at most its bound and a trajectory for each rollout in engines, and between two turns, at that moment. All of these are of admitted
    groups, of which there are fewer than (K + version + 1) * B (`rules.admission`).

    takes     Drawn, from prompts; Completion, from engines; Result, from environment
    gives     Generate, to engines; turns of episodes, to environment; Trajectory, to scoring
    waits for an admission credit; an engine that may take a lost group; room in completions, turns and towards scoring
    woken by  an engine that answers, commits, joins or dies; batching assigning or dropping a group
    fails     DataError, where hardly any prompt is not quarantined (`rules.quarantine`)
    ends      cancelled, when the run ends
    """

    name = "generation"
    prompts: Channel[Drawn]
    completions: Channel[Trajectory]
    """The engines' answers, until scoring has room for them."""
    trajectories: Channel[Trajectory]
    engines: Engines
    admission: Admission
    credits: Signal
    """Set when another group might be admitted."""
    ledger: Ledger
    watch: Watch
    sampling: Sampling
    group_size: int
    adds_greedy: bool = False
    chunk_tokens: int = 0
    backpressure: Callable[[], str | None] = lambda: None
    """The callback names what admission has to wait for, or returns None."""
    quarantine: Quarantine
    environment: EnvironmentStage | None = None
    leasing: Leasing | None = None
    """The stage that has agents outside of the run play the rollouts; None where engines are asked for them here."""
    dispatch: Dispatch[Rollout] | None = None
    """The rule that sends rollouts one by one; None where a group's siblings go to one engine the moment they are admitted."""
    group_cut: GroupCut | None = None
    """The rule that ends the last siblings of a group by a coin; None where all are written to their end."""
    next_group_id: int = 0
    interrupted: tuple[InterruptedGroup, ...] = ()
    """Groups of a run that goes on; they are issued before anything new, as far as no engine still has them."""
    _reissue: Reissue = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._reissue = Reissue(
            engines=self.engines,
            quarantine=self.quarantine,
            ledger=self.ledger,
            credits=self.credits,
            watch=self.watch,
            attempts=self,
        )
        if self.dispatch is not None:
            self.engines.on_load(self._reported)
            self.engines.on_died(self.dispatch.lost)
        for group in self.interrupted:
            for one in group.rollouts:
                rollout = self._begin(group.group_id, group.prompt, one.rollout_id, sibling=one.sibling, version=one.version)
                again = dataclasses.replace(rollout, attempt=one.attempt)
                if self.leasing is None:
                    self._start(again)
                else:
                    self.leasing.offer(again, then=self._pass_on)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._admit())
            group.create_task(self._reissue.run())
            group.create_task(self._collect())
            if self.dispatch is not None:
                group.create_task(self._send(self.dispatch))

    # --- new groups ---

    async def _admit(self) -> None:
        async for drawn in self.prompts:
            if self.quarantine.skips(drawn.prompt.prompt_id):
                self.ledger.record("skipped", now_s=_now_s(), prompt_id=drawn.prompt.prompt_id)
            else:
                self._send_group(drawn, await self._wait_for_engine())

    async def _wait_for_engine(self) -> int:
        """Wait until a group may be admitted; return the engine to send it to."""
        while (engine_id := self._engine_for_a_group()) is None:
            reason = self._held_back_by() or NO_ENGINE
            with self.watch.waiting(self.name, reason):
                while self._engine_for_a_group() is None and (self._held_back_by() or NO_ENGINE) == reason:
                    await self.credits.wait()
        return engine_id

    def _engine_for_a_group(self) -> int | None:
        return self.engines.least_busy(lambda version: self._held_back_by(version) is None)

    def _held_back_by(self, version: int | None = None) -> str | None:
        """Name what an engine at `version` would have to wait for; without a version, the serving engine that holds the newest."""
        version = self.engines.newest_version() if version is None else version
        if version is None:
            return NO_ENGINE
        return (
            self.full()
            or (self.environment.holds_back_groups() if self.environment else None)
            or self.backpressure()
            or self.admission.holds_back(
                version=version,
                num_generating=self._num_generating(),
                engines_are_current=self.engines.all_hold(self.admission.version),
            )
        )

    def _num_generating(self) -> int:
        if self.leasing is not None:
            return self.leasing.num_out
        return len(self.engines.requests) if self.dispatch is None else self.dispatch.num_waiting

    def full(self) -> str | None:
        """Name the queue that has to get shorter before anything more is asked of engines."""
        if self.completions.is_full:
            return f"room in {self.completions.name}"
        return self.environment.backpressure() if self.environment else None

    def _send_group(self, drawn: Drawn, engine_id: int) -> None:
        group_id, self.next_group_id = self.next_group_id, self.next_group_id + 1
        self.admission.admitted()
        group_size = self.group_size + self.adds_greedy
        names = self.ledger.admit(group_id, drawn.prompt, group_size=group_size, position=drawn.position, now_s=_now_s())
        version = self.engines[engine_id].version
        rollouts: list[Rollout] = []
        for sibling, name in enumerate(names):
            rollout = self._begin(group_id, drawn.prompt, name, sibling=sibling, version=version)
            if self.leasing is not None:
                self.leasing.offer(rollout, then=self._pass_on)
            elif rollout.is_stateful:
                self._start(rollout)
            elif self.dispatch is not None:
                rollouts.append(rollout)
            else:
                self.ask(rollout, engine_id)
        if self.dispatch is not None:
            self.dispatch.add(group_id, rollouts, num_prompt=len(drawn.prompt.token_ids), version=version)
            self.credits.set()

    def _begin(self, group_id: int, prompt: Prompt, rollout_id: str, *, sibling: int, version: int) -> Rollout:
        return Rollout(
            rollout_id=rollout_id,
            group_id=group_id,
            sibling=sibling,
            attempt=0,
            prompt=prompt,
            version=version,
            admitted_at=_now_s(),
            is_greedy=sibling >= self.group_size,
            episode=self.environment.begin(prompt) if self.environment else None,
        )

    def _start(self, rollout: Rollout) -> None:
        """Have a rollout issued as soon as an engine may take it; one whose environment has state once that stands."""
        if self.environment is not None and rollout.is_stateful:
            self.environment.ask(rollout, engine_id=-1, then=functools.partial(self._started, rollout))
        else:
            self._reissue.put(rollout)

    def _started(self, rollout: Rollout, result: Result) -> None:
        if result.is_lost and rollout.may_restart:
            self._start(rollout.restarted())
            return
        rollout = rollout.observe(result)
        if rollout.is_over:
            self.finish(rollout, unanswered(rollout.rollout_id, attempt=rollout.attempt, error=result.error), -1)
        else:
            self._reissue.put(rollout)
        self.credits.set()

    # --- one rollout at a time ---

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

    # --- one attempt ---

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
        )

    def _lost(self, rollout: Rollout, engine_id: int) -> None:
        self._ended(rollout, engine_id, num_tokens=None)
        self._reissue.lose(rollout, engine_id)

    def _refused(self, rollout: Rollout, engine_id: int, violation: Violation) -> None:
        self._ended(rollout, engine_id, num_tokens=None)
        self._reissue.refuse(rollout, engine_id, violation)

    def _ended(self, rollout: Rollout, engine_id: int, *, num_tokens: int | None) -> None:
        if self.dispatch is not None:
            self.dispatch.ended(rollout.rollout_id, engine_id=engine_id, num_tokens=num_tokens)

    def request(self, rollout: Rollout) -> Generate:
        sampling = msgspec.structs.replace(self.sampling, temperature=0.0) if rollout.is_greedy else self.sampling
        return rollout.request(sampling, chunk_tokens=self.chunk_tokens)

    def take(self, rollout: Rollout, completion: Completion, engine_id: int) -> None:
        is_whole = completion.finish in (Finish.STOP, Finish.LENGTH)
        self._ended(rollout, engine_id, num_tokens=len(completion.token_ids) if is_whole else None)
        if self.group_cut is not None:
            self._cut(rollout, self.group_cut)
        rollout = rollout.said(completion)
        if self.environment is None or rollout.is_over:
            self._end(rollout, completion, engine_id)
        else:
            self.environment.ask(rollout, engine_id=engine_id, then=functools.partial(self._go_on, rollout, completion, engine_id))

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

    def _go_on(self, rollout: Rollout, completion: Completion, engine_id: int, result: Result) -> None:
        """Ask for an episode's next turn. The engine of the last turn is asked where it may go on: its prefix cache may hold all before."""
        reissue = self._reissue
        if result.is_lost and rollout.may_restart:
            reissue.leave(rollout)
            self.ledger.lose(rollout.rollout_id, attempt=rollout.attempt, engine_id=engine_id, reason=LOST_ENVIRONMENT, now_s=_now_s())
            self._start(dataclasses.replace(rollout.restarted(), attempt=rollout.attempt + 1, reason=LOST_ENVIRONMENT))
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

    # --- towards scoring ---

    def finish(self, rollout: Rollout, completion: Completion, engine_id: int) -> None:
        """Pass an answer on."""
        if self.environment is not None:
            self.environment.end(rollout.rollout_id)
        self._pass_on(rollout.trajectory(completion, engine_id=engine_id, finished_at=_now_s()))

    def _pass_on(self, trajectory: Trajectory) -> None:
        """Record a trajectory and pass it on: it must be in the ledger before anything that it makes room for."""
        self.ledger.record_completion(trajectory, now_s=_now_s())
        self.completions.put_now(trajectory)  # bounded: `full` holds back requests, and each trajectory answers one

    async def _collect(self) -> None:
        async for trajectory in self.completions:
            self.credits.set()  # there may be room again
            await self.trajectories.put(trajectory)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
