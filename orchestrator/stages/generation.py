"""Stage 2: prompts become rollouts on engines, and the engines' answers become trajectories."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.snapshot import InterruptedGroup
from orchestrator.peers.engines import Engines
from orchestrator.rollouts.rollout import Rollout
from orchestrator.rules.admission import Admission
from orchestrator.rules.dispatch import Dispatch
from orchestrator.rules.group_cut import GroupCut
from orchestrator.rules.quarantine import Quarantine
from orchestrator.stages.engine_attempts import EngineAttempts
from orchestrator.stages.environment import EnvironmentStage
from orchestrator.stages.leasing import Desk
from orchestrator.stages.prompts import Drawn
from pipelinerl.messages import Prompt, Sampling, Trajectory
from pipelinerl.runtime.stage import Channel, Signal
from pipelinerl.runtime.watch import Watch

NO_ENGINE = "an engine that takes new work"
"""The reason to wait while every engine is fenced until it holds the newest policy."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Generation:
    """The stage that admits groups while the staleness bound allows it, and collects the engines' answers; `stages.engine_attempts` asks
    engines for attempts of rollouts, and `recovery.reissue` for those that were lost.

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
    leasing: Desk | None = None
    """The way to the stage that has agents outside of the run play the rollouts; None where engines are asked for them here."""
    dispatch: Dispatch[Rollout] | None = None
    """The rule that sends rollouts one by one; None where a group's siblings go to one engine the moment they are admitted."""
    group_cut: GroupCut | None = None
    """The rule that ends the last siblings of a group by a coin; None where all are written to their end."""
    next_group_id: int = 0
    interrupted: tuple[InterruptedGroup, ...] = ()
    """Groups of a run that goes on; they are issued before anything new, as far as no engine still has them."""
    _attempts: EngineAttempts = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._attempts = EngineAttempts(
            engines=self.engines,
            environment=self.environment,
            admission=self.admission,
            ledger=self.ledger,
            credits=self.credits,
            watch=self.watch,
            sampling=self.sampling,
            chunk_tokens=self.chunk_tokens,
            quarantine=self.quarantine,
            dispatch=self.dispatch,
            group_cut=self.group_cut,
            full=self.full,
            then=self._pass_on,
        )
        for group in self.interrupted:
            for one in group.rollouts:
                rollout = self._begin(group.group_id, group.prompt, one.rollout_id, sibling=one.sibling, version=one.version)
                again = dataclasses.replace(rollout, attempt=one.attempt)
                if self.leasing is None:
                    self._attempts.start(again)
                else:
                    self.leasing.offer(again, then=self._pass_on)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._admit())
            group.create_task(self._attempts.run())
            group.create_task(self._collect())

    async def _admit(self) -> None:
        async for drawn in self.prompts:
            if self.quarantine.skips(drawn.prompt.prompt_id):
                self.ledger.record("skipped", now_s=_now_s(), prompt_id=drawn.prompt.prompt_id)
                drawn.then(None)
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
                num_generating=self._num_generating() + self.engines.num_kept_free(self.admission.max_running),
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
        group_size = (drawn.num_siblings or self.group_size) + self.adds_greedy
        drawn.then(group_id)
        names = self.ledger.admit(group_id, drawn.prompt, group_size=group_size, position=drawn.position, now_s=_now_s())
        version = self.engines[engine_id].version
        rollouts = [self._begin(group_id, drawn.prompt, name, sibling=sibling, version=version) for sibling, name in enumerate(names)]
        if self.leasing is None:
            self._attempts.start_group(rollouts, engine_id)
        else:
            for rollout in rollouts:
                self.leasing.offer(rollout, then=self._pass_on)

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
