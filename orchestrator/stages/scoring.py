"""Stage 3: has every trajectory scored, without holding up an engine."""

from __future__ import annotations

import asyncio

from orchestrator.state.scorers import Scorers
from pipelinerl.messages import Finish, Outcome, Score, Scored, ScoredTrajectory, Trajectory
from pipelinerl.stages import Channel
from pipelinerl.watch import Watch


class Scoring:
    """Sends trajectories to scorers and joins the answers with them.

    takes     Trajectory, from dispatch; Scored, from scorers
    gives     Score, to scorers; ScoredTrajectory, to batching
    waits for room in a scorer; room towards batching
    woken by  a scorer that announces itself or answers
    fails     PeerGone, where a scorer's connection is closed; a failed reward is an outcome, not a failure
    ends      when the run does
    """

    name = "scoring"

    def __init__(
        self,
        *,
        trajectories: Channel[Trajectory],
        scored: Channel[ScoredTrajectory],
        scorers: Scorers,
        watch: Watch,
        queue_bytes: int,
    ) -> None:
        self._trajectories = trajectories
        self._scored = scored
        self._scorers = scorers
        self._watch = watch
        self._answers: Channel[ScoredTrajectory] = Channel(
            "scores",
            giver="scorers",
            taker=self.name,
            watch=watch,
            bound_bytes=queue_bytes,
            label=lambda item: f"of rollout {item.score.rollout_id}, attempt {item.score.attempt}",
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send())
            group.create_task(self._collect())

    async def _send(self) -> None:
        async for trajectory in self._trajectories:
            if trajectory.finish is Finish.ERROR:
                self._answer(trajectory, _engine_failed(trajectory))
                continue
            await self._wait_for_room()
            self._scorers.ask(score_request(trajectory), lambda scored, trajectory=trajectory: self._answer(trajectory, scored))

    async def _wait_for_room(self) -> None:
        if self._scorers.has_room:
            return
        with self._watch.waiting(self.name, "room in a scorer"):
            while not self._scorers.has_room:
                await self._scorers.changed.wait()

    def _answer(self, trajectory: Trajectory, scored: Scored) -> None:
        self._answers.put_now(ScoredTrajectory(trajectory=trajectory, score=scored))  # bounded by the scorers' room

    async def _collect(self) -> None:
        async for scored in self._answers:
            await self._scored.put(scored)


def score_request(trajectory: Trajectory) -> Score:
    """What a scorer is told of a trajectory: the prompt and the tokens after it."""
    return Score(
        rollout_id=trajectory.rollout_id,
        attempt=trajectory.attempt,
        prompt=trajectory.prompt,
        token_ids=trajectory.token_ids[len(trajectory.prompt.token_ids) :],
        finish=trajectory.finish,
    )


def _engine_failed(trajectory: Trajectory) -> Scored:
    return Scored(
        rollout_id=trajectory.rollout_id,
        attempt=trajectory.attempt,
        outcome=Outcome.ERROR,
        reward=None,
        error=f"engine {trajectory.engine_id}: {trajectory.error}",
    )
