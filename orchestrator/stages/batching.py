"""Stage 4: siblings become groups, groups become samples, samples become rows, and a step is sealed when it is complete."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.rollouts import summary_of
from orchestrator.ledger.snapshot import RecordedStep
from orchestrator.observe.progress import Progress
from orchestrator.rollouts.rows import Row, StepEnd
from orchestrator.rules.admission import Admission
from orchestrator.rules.batch import BatchCut, Verdict
from orchestrator.rules.grouping import Grouping
from pipelinerl.data.packing import Packing
from pipelinerl.errors import Stalled
from pipelinerl.messages import Group, Sample, ScoredTrajectory
from pipelinerl.runtime.stage import Channel, Signal
from pipelinerl.runtime.watch import Watch


class Batching:
    """The stage that cuts batches as groups complete. A row or a seal leaves only once the ledger has it on disk: see `ledger.ledger`.

    Rows leave as they fill, while the step is still being filled. Only under a method with a rule over the whole step do they all leave
    when it closes: training on a step then no longer overlaps with its own generation, only with that of the next steps.

    takes     ScoredTrajectory, from scoring
    gives     Row and StepEnd, to training
    waits for the ledger to write a row; room towards training
    woken by  training taking a row
    fails     never on one group: what cannot be trained gets a terminal status and returns its credit; Stalled, after `max_dropped` of
              them in a row that failed or were too old
    ends      when the run does
    """

    name = "batching"

    def __init__(
        self,
        *,
        scored: Channel[ScoredTrajectory],
        rows: Channel[Row | StepEnd],
        grouping: Grouping,
        cut: BatchCut,
        packing: Packing,
        admission: Admission,
        credits: Signal,
        ledger: Ledger,
        progress: Progress,
        watch: Watch,
        queue_bytes: int,
        max_dropped: int,
        causes: Callable[[], str] = lambda: "",
        settled: Callable[[Group], None] = lambda group: None,
        restored: tuple[ScoredTrajectory, ...] = (),
        open_step: RecordedStep | None = None,
    ) -> None:
        """Call `settled` for every group that was assigned or dropped, within its transaction; `causes` names errors in users' functions.

        An earlier process of the run left `restored`, which was scored and not assigned, and `open_step`, which was assigned to the step
        being filled.
        """
        self._scored = scored
        self._rows = rows
        self._grouping = grouping
        self._cut = cut
        self._packing = packing
        self._admission = admission
        self._credits = credits
        self._ledger = ledger
        self._progress = progress
        self._max_dropped = max_dropped
        self._causes = causes
        self._num_dropped = 0
        self._settled = settled
        self._restored = restored
        self._loose = open_step.unpacked if open_step else ()
        self._next_row = len(open_step.rows) if open_step else 0
        """The number of the next row of the step being filled."""
        self._packed: Channel[Row | StepEnd] = Channel(
            "packed", giver=self.name, taker="ledger", watch=watch, bound_bytes=queue_bytes, size=lambda item: item.num_bytes
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._record())
            await self._batch()
            self._packed.close()

    async def _batch(self) -> None:
        step = self._cut.step
        if not self._cut.is_holding:
            for sample in self._loose:
                await self._pack(step, self._packing.add(sample))
        if self._cut.is_full:  # the earlier life ended between its last group and its seal
            await self._seal(step, *self._cut.close())
        for scored in self._restored:
            await self._take(scored)
        async for scored in self._scored:
            await self._take(scored)

    async def _take(self, scored: ScoredTrajectory) -> None:
        group = self._grouping.add(scored)
        if group is not None:
            await self._settle(self._cut.take(group))

    async def _settle(self, verdict: Verdict) -> None:
        now = asyncio.get_running_loop().time()
        with self._ledger.transaction():
            self._book(verdict, now_s=now)
            self._settled(verdict.group)
        self._credits.set()
        self._progress.group_completed(verdict, now_s=now)
        if self._num_dropped >= self._max_dropped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self._ledger.reasons.most_common(5))
            causes = "".join(f"\n  {line}" for line in self._causes().splitlines())
            raise Stalled(
                f"the last {self._num_dropped} groups were all dropped, so no step fills; rollouts so far by reason: {reasons}{causes}"
            )
        for sample in verdict.delivered:
            await self._pack(verdict.step, self._packing.add(sample))
        if verdict.closes_step:
            await self._seal(verdict.step, verdict.num_tokens, verdict.num_samples)

    def _book(self, verdict: Verdict, *, now_s: float) -> None:
        for ended in verdict.ended:
            trajectory = ended.scored.trajectory
            summary = summary_of(trajectory, reward=ended.scored.score.reward, step=ended.step)
            self._ledger.end(trajectory.rollout_id, ended.status, now_s=now_s, reason=ended.reason, summary=summary)
        if verdict.is_assigned:
            self._admission.assigned()
            self._ledger.assign(verdict.group.group_id, verdict.samples, step=verdict.step, now_s=now_s)
            if verdict.delivered is not verdict.samples:
                self._ledger.set_advantages(verdict.delivered)
            self._num_dropped = 0
        else:
            self._admission.dropped()
            self._ledger.drop(verdict.group.group_id, step=verdict.step)
            self._num_dropped += not verdict.is_filtered  # those have a budget of their own, after which groups are assigned

    async def _pack(self, step: int, rows: list[list[Sample]]) -> None:
        for samples in rows:
            self._ledger.pack(samples, step=step, row=self._next_row, now_s=asyncio.get_running_loop().time())
            self._next_row += 1
            await self._packed.put(Row(step=step, samples=tuple(samples)))

    async def _seal(self, step: int, num_tokens: int, num_samples: int) -> None:
        """Pack the rest of a step, and send its end."""
        await self._pack(step, self._packing.flush())
        now_s = asyncio.get_running_loop().time()
        num_rows, self._next_row = self._next_row, 0
        commit = self._ledger.close_step(step, num_rows=num_rows, num_tokens=num_tokens, num_samples=num_samples, now_s=now_s)
        await self._packed.put(StepEnd(step=step, num_tokens=num_tokens, num_samples=num_samples, commit=commit))

    async def _record(self) -> None:
        """Send packed items on, once they are written. While the ledger writes, more items are packed, and these are then written
        together.
        """
        loop = asyncio.get_running_loop()
        async for first in self._packed:
            items = [first]
            while (item := self._packed.get_now()) is not None:
                items.append(item)
            durably = any(isinstance(item, StepEnd) for item in items)
            await loop.run_in_executor(None, functools.partial(self._ledger.flush, durably=durably))
            for item in items:
                await self._rows.put(item)
