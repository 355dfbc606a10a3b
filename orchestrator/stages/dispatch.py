"""Stage 2: turns prompts into rollouts on engines, and engine replies into trajectories."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools

from orchestrator.rollouts.single_turn import trajectory_of
from orchestrator.rules.admission import Admission
from orchestrator.state.engines import Engines
from orchestrator.state.ledger import Admitted, Ledger
from pipelinerl.messages import Completion, Generate, Prompt, Sampling, Trajectory
from pipelinerl.stages import Channel, Signal
from pipelinerl.watch import Watch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A rollout in an engine."""

    rollout_id: str
    group_id: int
    sibling: int
    prompt: Prompt
    admitted_at: float


class Dispatch:
    """Admits groups while the staleness bound allows it, and gathers what the engines sampled.

    takes     Prompt, from prompts; Completion, from engines
    gives     Generate, to engines; Trajectory, to scoring
    waits for an admission credit; room towards scoring
    woken by  an engine that answers or commits, batching placing or giving up a group
    fails     PeerGone, where an engine's connection is closed
    ends      when the run does
    """

    name = "dispatch"

    def __init__(
        self,
        *,
        prompts: Channel[Prompt],
        trajectories: Channel[Trajectory],
        engines: Engines,
        admission: Admission,
        credits: Signal,
        ledger: Ledger,
        watch: Watch,
        sampling: Sampling,
        group_size: int,
        queue_bytes: int,
    ) -> None:
        self._prompts = prompts
        self._trajectories = trajectories
        self._engines = engines
        self._admission = admission
        self._credits = credits
        self._ledger = ledger
        self._watch = watch
        self._sampling = sampling
        self._group_size = group_size
        self._completions: Channel[tuple[Rollout, Completion, int]] = Channel(
            "completions",
            giver="engines",
            taker=self.name,
            watch=watch,
            bound_bytes=queue_bytes,
            label=lambda item: f"rollout {item[1].rollout_id}, attempt {item[1].attempt}, of engine-{item[2]}",
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._admit())
            group.create_task(self._collect())

    async def _admit(self) -> None:
        group_ids = itertools.count()
        async for prompt in self._prompts:
            await self._wait_for_credit()
            self._send_group(next(group_ids), prompt)

    async def _wait_for_credit(self) -> None:
        while (reason := self._held_back_by()) is not None:
            with self._watch.waiting(self.name, reason):
                while self._held_back_by() == reason:
                    await self._credits.wait()

    def _held_back_by(self, version: int | None = None) -> str | None:
        """What an engine at `version` would have to wait for; without one, the engine that holds the newest."""
        version = self._engines.newest_version() if version is None else version
        return self._admission.holds_back(
            version=version,
            num_generating=self._engines.num_outstanding,
            engines_are_current=self._engines.all_hold(self._admission.version),
        )

    def _send_group(self, group_id: int, prompt: Prompt) -> None:
        engine_id = self._engines.least_busy(lambda version: self._held_back_by(version) is None)
        assert engine_id is not None, "the engine that holds the newest policy is admissible: a credit was just awaited"
        now = asyncio.get_running_loop().time()
        self._admission.admitted()
        for sibling in range(self._group_size):
            rollout = Rollout(rollout_id=f"{group_id}/{sibling}", group_id=group_id, sibling=sibling, prompt=prompt, admitted_at=now)
            self._ledger.admit(Admitted(rollout_id=rollout.rollout_id, group_id=group_id, prompt_id=prompt.prompt_id, admitted_s=now))
            request = Generate(rollout_id=rollout.rollout_id, attempt=0, token_ids=prompt.token_ids, sampling=self._sampling)
            self._engines.ask(request, engine_id, self._sink(rollout))

    def _sink(self, rollout: Rollout):
        def take(completion: Completion, engine_id: int) -> None:
            self._completions.put_now((rollout, completion, engine_id))  # bounded by admission: one for each rollout outstanding

        return take

    async def _collect(self) -> None:
        loop = asyncio.get_running_loop()
        async for rollout, completion, engine_id in self._completions:
            await self._trajectories.put(
                trajectory_of(
                    completion,
                    prompt=rollout.prompt,
                    group_id=rollout.group_id,
                    sibling=rollout.sibling,
                    engine_id=engine_id,
                    admitted_at=rollout.admitted_at,
                    finished_at=loop.time(),
                )
            )
