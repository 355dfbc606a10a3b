"""Between scoring and batching, in runs whose config has a reward per group: has the siblings of a prompt compared."""

from __future__ import annotations

import asyncio

from orchestrator.rules.comparing import join_comparison, plan_comparison
from orchestrator.rules.grouping import Grouping
from orchestrator.stages.scoring import score_request
from orchestrator.state.scorers import Scorers
from pipelinerl.messages import Group, GroupScored, ScoredTrajectory, ScoreGroup
from pipelinerl.stages import Channel
from pipelinerl.watch import Watch


class Comparing:
    """Collects siblings, asks a scorer to compare them, and passes each on with the sum of its rewards.

    takes     ScoredTrajectory, from scoring; GroupScored, from scorers
    gives     ScoreGroup, to scorers; ScoredTrajectory, to batching
    waits for the last sibling of a group; room in a scorer; room towards batching
    woken by  a scorer that answers
    fails     never by itself: a comparison that fails is an outcome
    ends      when the run does
    """

    name = "comparing"

    def __init__(
        self,
        *,
        scored: Channel[ScoredTrajectory],
        compared: Channel[ScoredTrajectory],
        scorers: Scorers,
        watch: Watch,
        group_size: int,
        min_survivors: int,
        queue_bytes: int,
    ) -> None:
        self._scored = scored
        self._compared = compared
        self._scorers = scorers
        self._watch = watch
        self._grouping = Grouping(group_size=group_size)
        self._min_survivors = min_survivors
        self._answers: Channel[tuple[ScoredTrajectory, ...]] = Channel(
            "comparisons", giver="scorers", taker=self.name, watch=watch, bound_bytes=queue_bytes
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ask())
            group.create_task(self._collect())

    async def _ask(self) -> None:
        async for scored in self._scored:  # what is collected here is bounded by admission
            group = self._grouping.add(scored)
            if group is not None:
                await self._compare(group)

    async def _compare(self, group: Group) -> None:
        plan = plan_comparison(group, min_survivors=self._min_survivors)
        if plan.done:
            self._answers.put_now(plan.done)
        if not plan.compared:
            return
        if not self._scorers.has_room:
            with self._watch.waiting(self.name, "room in a scorer"):
                while not self._scorers.has_room:
                    await self._scorers.changed.wait()
        request = ScoreGroup(group_id=group.group_id, members=tuple(score_request(member.trajectory) for member in plan.compared))
        self._scorers.ask_group(request, lambda answer: self._take(plan.compared, answer))

    def _take(self, compared: tuple[ScoredTrajectory, ...], answer: GroupScored) -> None:
        self._answers.put_now(join_comparison(compared, answer))  # bounded by the scorers' room

    async def _collect(self) -> None:
        async for members in self._answers:
            for member in members:
                await self._compared.put(member)
