"""Stage 4: siblings become groups, groups become samples, samples become rows, and a step is sealed when it is whole."""

from __future__ import annotations

import asyncio
import dataclasses

from orchestrator.progress import Progress
from orchestrator.rules.admission import Admission
from orchestrator.rules.batch import BatchCut, Verdict
from orchestrator.rules.grouping import Grouping
from orchestrator.rules.packing import Packing
from orchestrator.state.ledger import Facts, Ledger
from pipelinerl.errors import Stalled
from pipelinerl.messages import Sample, ScoredTrajectory, Trajectory
from pipelinerl.stages import Channel, Signal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Samples that go through the trainer together, laid end to end."""

    step: int
    samples: tuple[Sample, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its token columns: 17 for each token."""
        return 17 * sum(sample.trajectory.num_tokens for sample in self.samples)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """A step has all its rows."""

    step: int
    num_tokens: int
    num_samples: int

    num_bytes = 0


class Batching:
    """Cuts batches as groups complete.

    Rows leave as they fill, while the step is still being filled. Only under a method with a rule over the whole step do they all leave
    when it closes: training on a step then no longer hides inside its own generation, only inside that of the next ones.

    takes     ScoredTrajectory, from scoring
    gives     Row and Seal, to delivery
    waits for room towards delivery
    woken by  delivery taking a row
    fails     never on one group: what cannot be trained gets a fate and returns its credit; Stalled, after `max_given_up` of them in a row
              that failed or were too old
    ends      when the run does
    """

    name = "batching"

    def __init__(
        self,
        *,
        scored: Channel[ScoredTrajectory],
        rows: Channel[Row | Seal],
        grouping: Grouping,
        cut: BatchCut,
        packing: Packing,
        admission: Admission,
        credits: Signal,
        ledger: Ledger,
        progress: Progress,
        max_given_up: int,
    ) -> None:
        self._scored = scored
        self._rows = rows
        self._grouping = grouping
        self._cut = cut
        self._packing = packing
        self._admission = admission
        self._credits = credits
        self._ledger = ledger
        self._progress = progress
        self._max_given_up = max_given_up
        self._num_given_up = 0

    async def run(self) -> None:
        async for scored in self._scored:
            group = self._grouping.add(scored)
            if group is not None:
                await self._settle(self._cut.take(group))

    async def _settle(self, verdict: Verdict) -> None:
        now = asyncio.get_running_loop().time()
        for ended in verdict.ended:
            trajectory = ended.scored.trajectory
            facts = facts_of(trajectory, reward=ended.scored.score.reward, step=None)
            self._ledger.end(trajectory.rollout_id, ended.fate, now_s=now, reason=ended.reason, facts=facts)
        if verdict.is_placed:
            self._admission.placed()
            self._num_given_up = 0
        else:
            self._admission.given_up()
            self._num_given_up += not verdict.is_set_aside  # those have a budget of their own, after which groups are placed
        self._credits.set()
        self._progress.settled(verdict, now_s=now)
        if self._num_given_up >= self._max_given_up:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self._ledger.reasons.most_common(5))
            raise Stalled(f"the last {self._num_given_up} groups were all given up, so no step fills; rollouts so far by reason: {reasons}")
        for sample in verdict.delivered:
            for samples in self._packing.add(sample):
                await self._rows.put(Row(step=verdict.step, samples=tuple(samples)))
        if verdict.closes_step:
            for samples in self._packing.flush():
                await self._rows.put(Row(step=verdict.step, samples=tuple(samples)))
            await self._rows.put(Seal(step=verdict.step, num_tokens=verdict.num_tokens, num_samples=verdict.num_samples))


def facts_of(trajectory: Trajectory, *, reward: float | None, step: int | None) -> Facts:
    """What the ledger records of a trajectory that ended."""
    sampled = trajectory.versions[trajectory.trains]
    return Facts(
        step=step,
        reward=reward,
        oldest_version=int(sampled[0]) if len(sampled) else None,
        newest_version=int(sampled[-1]) if len(sampled) else None,
        num_tokens=len(sampled),
    )
