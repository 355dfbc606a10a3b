"""Stage 4: siblings become groups, groups become samples, samples become rows, and a step is closed when it is complete."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.rollouts import summary_of
from orchestrator.ledger.snapshot import RecordedStep
from orchestrator.observe.progress import Progress
from orchestrator.rollouts.rows import Row, StepEnd
from orchestrator.rules.admission import Admission
from orchestrator.rules.batch import Cut, Verdict
from orchestrator.rules.grouping import Grouping
from pipelinerl.data.packing import Packing
from pipelinerl.errors import Stalled
from pipelinerl.messages import Group, Sample, ScoredTrajectory
from pipelinerl.runtime.stage import Channel, Signal


@dataclasses.dataclass(slots=True, kw_only=True)
class Batching:
    """The stage that cuts batches as groups complete. A row or an end leaves only once the ledger has it on disk: see `ledger.ledger`.

    Rows leave as they fill, while the step is still being filled. Only under a method with a rule over the whole step do they all leave
    when it closes: training on a step then no longer overlaps with its own generation, only with that of the next steps.

    takes     ScoredTrajectory, from scoring
    gives     Row and StepEnd, to training
    waits for the ledger to write a row; room towards training
    woken by  training taking a row
    fails     never on one group: what cannot be trained gets a terminal status and returns its credit; Stalled, after `max_dropped` of
              them in a row that failed or were too old
    ends      cancelled, when the run ends
    """

    name = "batching"

    scored: Channel[ScoredTrajectory]
    packed: Channel[Row | StepEnd]
    """The rows and ends that the ledger has yet to write."""
    rows: Channel[Row | StepEnd]
    grouping: Grouping
    cut: Cut
    packing: Packing
    admission: Admission
    credits: Signal
    ledger: Ledger
    progress: Progress
    max_dropped: int
    causes: Callable[[], str] = lambda: ""
    """The callback names errors in users' functions."""
    settled: Callable[[Group], None] = lambda group: None
    """The callback for every group that was assigned or dropped, called within its transaction."""
    restored: tuple[ScoredTrajectory, ...] = ()
    """Trajectories that were scored before a restart, and not assigned."""
    open_step: RecordedStep | None = None
    """The step that was being filled at a restart, and what was assigned to it."""
    _num_dropped: int = 0
    _next_row: int = 0
    """The number of the next row of the step being filled."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._record())
            await self._batch()
            self.packed.close()

    async def _batch(self) -> None:
        if self.open_step is not None:
            await self.restore(self.open_step)
        for scored in self.restored:
            await self._take(scored)
        async for scored in self.scored:
            await self._take(scored)

    async def restore(self, open_step: RecordedStep) -> None:
        self.cut.restore(open_step.samples, num_groups=open_step.num_groups, groups=open_step.groups, num_stopped=open_step.num_stopped)
        step, self._next_row = self.cut.step, len(open_step.rows)
        if not self.cut.is_holding:
            for sample in open_step.unpacked:
                await self._pack(step, self.packing.add(sample))
        if self.cut.is_full:  # the earlier process ended between its last group and its end
            await self.close_step(step, *self.cut.close())

    async def _take(self, scored: ScoredTrajectory) -> None:
        if (group := self.grouping.add(scored)) is not None:
            await self.deliver(self.decide(group))

    def decide(self, group: Group) -> Verdict:
        """Have the cut say what becomes of a group, and book it."""
        verdict = self.cut.take(group)
        now = asyncio.get_running_loop().time()
        with self.ledger.transaction():
            self._book(verdict, now_s=now)
            self.settled(verdict.group)
        self.credits.set()
        self.progress.group_completed(verdict, now_s=now)
        if self._num_dropped >= self.max_dropped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.ledger.reasons.most_common(5))
            causes = "".join(f"\n  {line}" for line in self.causes().splitlines())
            raise Stalled(
                f"the last {self._num_dropped} groups were all dropped, so no step fills; rollouts so far by reason: {reasons}{causes}"
            )
        return verdict

    async def deliver(self, verdict: Verdict) -> None:
        """Pack the samples that leave with a group, and close the step that it completes."""
        for sample in verdict.delivered:
            await self._pack(verdict.step, self.packing.add(sample))
        if verdict.closes_step:
            await self.close_step(verdict.step, verdict.num_tokens, verdict.num_samples)

    def _book(self, verdict: Verdict, *, now_s: float) -> None:
        for ended in verdict.ended:
            trajectory = ended.scored.trajectory
            summary = summary_of(trajectory, reward=ended.scored.score.reward, step=ended.step)
            self.ledger.end(trajectory.rollout_id, ended.status, now_s=now_s, reason=ended.reason, summary=summary)
        if verdict.is_assigned:
            self.admission.assigned()
            self.ledger.assign(verdict.group.group_id, verdict.samples, step=verdict.step, now_s=now_s)
            if verdict.delivered is not verdict.samples:
                self.ledger.set_advantages(verdict.delivered)
            self._num_dropped = 0
        else:
            self.admission.dropped()
            self.ledger.drop(verdict.group.group_id, step=verdict.step)
            self._num_dropped += not verdict.is_filtered  # those have a budget of their own, after which groups are assigned

    async def _pack(self, step: int, rows: list[list[Sample]]) -> None:
        for samples in rows:
            self.ledger.pack(samples, step=step, row=self._next_row, now_s=asyncio.get_running_loop().time())
            self._next_row += 1
            await self.packed.put(Row(step=step, samples=tuple(samples)))

    async def close_step(self, step: int, num_tokens: int, num_samples: int) -> None:
        """Pack the rest of a step, and send its end."""
        await self._pack(step, self.packing.flush())
        now_s = asyncio.get_running_loop().time()
        num_rows, self._next_row = self._next_row, 0
        commit = self.ledger.close_step(step, num_rows=num_rows, num_tokens=num_tokens, num_samples=num_samples, now_s=now_s)
        await self.packed.put(StepEnd(step=step, num_tokens=num_tokens, num_samples=num_samples, commit=commit))

    async def _record(self) -> None:
        """Send packed items on, once they are written. While the ledger writes, more items are packed, and these are then written
        together.
        """
        async for first in self.packed:
            items = [first]
            while (item := self.packed.get_now()) is not None:
                items.append(item)
            durably = any(isinstance(item, StepEnd) for item in items)
            await asyncio.get_running_loop().run_in_executor(None, functools.partial(self.ledger.flush, durably=durably))
            for item in items:
                await self.rows.put(item)
