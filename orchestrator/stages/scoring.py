"""Stage 3: every trajectory is scored, without holding up an engine."""

from __future__ import annotations

import asyncio
import dataclasses

from orchestrator.ledger.ledger import Ledger
from orchestrator.peers.scorers import Scorers
from orchestrator.rollouts.scorer_tasks import failed_score, posted_score, reward_task, score_of, stopped_score, unscored
from orchestrator.rules.group_cut import GroupCut
from pipelinerl.messages import ScoredTrajectory, Trajectory
from pipelinerl.runtime.stage import Channel


@dataclasses.dataclass(slots=True, kw_only=True)
class Scoring:
    """The stage that gives every trajectory a score. Trajectories in scorers and those that wait for the next stage share the room in
    `scored`.

    takes     Trajectory, from generation
    gives     ScoredTrajectory, to the next stage
    waits for room in `scored`; a scorer's result
    woken by  a trajectory; a result
    fails     never: a failed reward is an outcome, and what a scorer that ends had is asked of another
    ends      cancelled, when the run ends
    """

    name = "scoring"
    trajectories: Channel[Trajectory]
    scored: Channel[ScoredTrajectory]
    scorers: Scorers
    ledger: Ledger
    group_cut: GroupCut | None = None
    """The rule that has ended some of the rollouts early; None where none is."""
    has_rewards: bool = True
    """False in a run whose agents post every reward."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            async for trajectory in self.trajectories:
                await self.scored.claim(trajectory.num_bytes)
                group.create_task(self._score(trajectory))

    async def _score(self, trajectory: Trajectory) -> None:
        decision = self.group_cut.decided(trajectory.rollout_id, trajectory.attempt) if self.group_cut is not None else None
        score = failed_score(trajectory) or posted_score(trajectory) or stopped_score(trajectory, decision)
        if score is None and not self.has_rewards:
            score = unscored(trajectory)
        if score is None:
            score = score_of(trajectory, await self.scorers.request(reward_task(trajectory), by=self.name))
        if self.group_cut is not None and score.reward is not None:
            self.group_cut.scored(score.reward)
        scored = ScoredTrajectory(trajectory=trajectory, score=score, early_stop=decision)
        self.ledger.record_score(scored, now_s=asyncio.get_running_loop().time())
        self.scored.put_claimed(scored)
