"""Between scoring and batching, in runs whose config has a reward per group: has the siblings of a prompt compared."""

from __future__ import annotations

import asyncio

from orchestrator.ledger.ledger import Ledger
from orchestrator.rules.group_rewards import Plan, join_comparison, plan_comparison
from orchestrator.rules.grouping import Grouping
from orchestrator.stages.requests import Asking
from orchestrator.stages.scoring import score_request
from pipelinerl.messages import GroupScored, Outcome, ScoredTrajectory, ScoreGroup
from pipelinerl.runtime.stage import Channel
from pipelinerl.runtime.watch import Watch


class GroupRewards:
    """Collects siblings, asks a scorer to compare them, and passes each on with the sum of its rewards.

    `queue_bytes` bounds what scorers compare and the comparisons that wait to be taken on, together. Siblings that wait for the last of
    their group are bounded by admission, in number.

    takes     ScoredTrajectory, from scoring; GroupScored, from scorers
    gives     ScoreGroup, to scorers; ScoredTrajectory, to batching
    waits for the last sibling of a group; room in comparisons; room in a scorer; room towards batching
    woken by  a scorer that announces itself, answers or dies
    fails     never by itself: a comparison that fails is an outcome
    ends      when the run does
    """

    name = "group_rewards"

    def __init__(
        self,
        *,
        scored: Channel[ScoredTrajectory],
        compared: Channel[ScoredTrajectory],
        asking: Asking,
        ledger: Ledger,
        watch: Watch,
        grouping: Grouping,
        min_group_size: int,
        queue_bytes: int,
        restored: tuple[ScoredTrajectory, ...] = (),
    ) -> None:
        """Of an earlier life of the run, `restored` was scored and not compared."""
        self._scored = scored
        self._compared = compared
        self._asking = asking
        self._ledger = ledger
        self._grouping = grouping
        self._min_group_size = min_group_size
        self._restored = restored
        self._answers: Channel[tuple[ScoredTrajectory, ...]] = Channel(
            "comparisons",
            giver="scorers",
            taker=self.name,
            watch=watch,
            bound_bytes=queue_bytes,
            size=_num_bytes,
            label=lambda members: f"of group {members[0].trajectory.group_id}",
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ask())
            group.create_task(self._collect())

    async def _ask(self) -> None:
        for scored in self._restored:
            await self._take(scored)
        async for scored in self._scored:
            await self._take(scored)

    async def _take(self, scored: ScoredTrajectory) -> None:
        group = self._grouping.add(scored)
        if group is None:
            return
        plan = plan_comparison(group, min_group_size=self._min_group_size)
        await self._answers.claim(_num_bytes(group.members))
        if not plan.compared:
            self._answer(plan.done)
            return
        await self._asking.ask_group(
            ScoreGroup(group_id=group.group_id, members=tuple(score_request(member.trajectory) for member in plan.compared)),
            by=self.name,
            sink=lambda answer: self._join(plan, answer),
            refused=lambda error: self._join(plan, GroupScored(group_id=group.group_id, outcome=Outcome.ERROR, error=error)),
        )

    def _join(self, plan: Plan, answer: GroupScored) -> None:
        self._answer((*plan.done, *join_comparison(plan.compared, answer)))

    def _answer(self, members: tuple[ScoredTrajectory, ...]) -> None:
        self._ledger.update_scores("group_scored", members, now_s=asyncio.get_running_loop().time())
        self._answers.put_claimed(members)

    async def _collect(self) -> None:
        async for members in self._answers:
            for member in members:
                await self._compared.put(member)


def _num_bytes(members: tuple[ScoredTrajectory, ...]) -> int:
    return sum(member.trajectory.num_bytes for member in members)
