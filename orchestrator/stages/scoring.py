"""Stage 3: has every trajectory scored, without holding up an engine; what a scorer takes with it is asked for again."""

from __future__ import annotations

import asyncio

from orchestrator.ledger.ledger import Ledger
from orchestrator.stages.requests import Asking
from pipelinerl.messages import Finish, Outcome, Score, Scored, ScoredTrajectory, Trajectory
from pipelinerl.runtime.stage import Channel
from pipelinerl.runtime.watch import Watch


class Scoring:
    """Sends trajectories to scorers and joins the answers with them.

    `queue_bytes` bounds what scorers have and the scores that wait to be taken on, together: the trajectories of both are held here.

    takes     Trajectory, from generation; Scored, from scorers
    gives     Score, to scorers; ScoredTrajectory, to batching
    waits for room in scores; room in a scorer; room towards batching
    woken by  a scorer that announces itself, answers or dies
    fails     never: a failed reward is an outcome, and a scorer that ends is one that starts again
    ends      when the run does
    """

    name = "scoring"

    def __init__(
        self,
        *,
        trajectories: Channel[Trajectory],
        scored: Channel[ScoredTrajectory],
        asking: Asking,
        ledger: Ledger,
        watch: Watch,
        queue_bytes: int,
    ) -> None:
        self._trajectories = trajectories
        self._scored = scored
        self._asking = asking
        self._ledger = ledger
        self._answers: Channel[ScoredTrajectory] = Channel(
            "scores",
            giver="scorers",
            taker=self.name,
            watch=watch,
            bound_bytes=queue_bytes,
            size=lambda item: item.trajectory.num_bytes,
            label=lambda item: f"of rollout {item.score.rollout_id}, attempt {item.score.attempt}",
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send())
            group.create_task(self._asking.run())
            group.create_task(self._collect())

    async def _send(self) -> None:
        async for trajectory in self._trajectories:
            await self._answers.claim(trajectory.num_bytes)
            if trajectory.outcome is not Outcome.OK:
                self._answer(trajectory, _not_scored(trajectory, trajectory.error, outcome=trajectory.outcome))
                continue
            if trajectory.finish is Finish.ERROR:
                self._answer(trajectory, _not_scored(trajectory, f"engine {trajectory.engine_id}: {trajectory.error}"))
                continue
            await self._asking.ask(
                score_request(trajectory),
                by=self.name,
                sink=lambda scored, trajectory=trajectory: self._answer(trajectory, scored),
                refused=lambda error, trajectory=trajectory: self._answer(trajectory, _not_scored(trajectory, error)),
            )

    def _answer(self, trajectory: Trajectory, scored: Scored) -> None:
        answer = ScoredTrajectory(trajectory=trajectory, score=scored)
        self._ledger.record_score(answer, now_s=asyncio.get_running_loop().time())
        self._answers.put_claimed(answer)

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
        turns=trajectory.turns,
    )


def _not_scored(trajectory: Trajectory, error: str, *, outcome: Outcome = Outcome.ERROR) -> Scored:
    return Scored(rollout_id=trajectory.rollout_id, attempt=trajectory.attempt, outcome=outcome, reward=None, error=error)
