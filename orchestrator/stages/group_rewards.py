"""This stage stands between scoring and batching, in runs whose config has a reward per group: it has the siblings of a prompt compared."""

from __future__ import annotations

import asyncio
import dataclasses

from orchestrator.ledger.ledger import Ledger
from orchestrator.peers.scorers import Scorers
from orchestrator.rollouts.scorer_tasks import group_reward_task
from orchestrator.rules.group_rewards import Plan, join_comparison, plan_comparison
from orchestrator.rules.grouping import Grouping
from pipelinerl.messages import ScoredTrajectory
from pipelinerl.runtime.stage import Channel


@dataclasses.dataclass(slots=True, kw_only=True)
class GroupRewards:
    """The stage that collects siblings, has a scorer compare them, and passes each on with the sum of its rewards.

    The groups being compared and those that wait for batching share the room in `group_scored`. Admission bounds the number of siblings
    that wait for the last of their group.

    takes     ScoredTrajectory, from the stage before
    gives     ScoredTrajectory, to batching
    waits for the last sibling of a group; room in `group_scored`; a scorer's result
    woken by  a scored trajectory; a result
    fails     never: a comparison that fails is an outcome
    ends      cancelled, when the run ends
    """

    name = "group_rewards"
    scored: Channel[ScoredTrajectory]
    group_scored: Channel[ScoredTrajectory]
    scorers: Scorers
    ledger: Ledger
    grouping: Grouping
    min_group_size: int
    restored: tuple[ScoredTrajectory, ...] = ()
    """Trajectories that were scored before a restart, and not compared."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for scored in self.restored:
                await self._take(scored, group)
            async for scored in self.scored:
                await self._take(scored, group)

    async def _take(self, scored: ScoredTrajectory, tasks: asyncio.TaskGroup) -> None:
        group = self.grouping.add(scored)
        if group is not None:
            await self.group_scored.claim(sum(member.trajectory.num_bytes for member in group.members))
            tasks.create_task(self._compare(plan_comparison(group, min_group_size=self.min_group_size)))

    async def _compare(self, plan: Plan) -> None:
        members = plan.done
        if plan.compared:
            task = group_reward_task([member.trajectory for member in plan.compared])
            members += join_comparison(plan.compared, await self.scorers.request(task, by=self.name))
        self.ledger.update_scores("group_scored", members, now_s=asyncio.get_running_loop().time())
        for member in members:
            self.group_scored.put_claimed(member)
