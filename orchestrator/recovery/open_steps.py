"""The open steps are those whose rows the trainer may still ask for: the steps after the last one in its weights.

A trainer that starts again begins where its checkpoint ends: the rows of later steps are read from the ledger once more.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Mapping

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.rollouts import summary_of
from orchestrator.ledger.snapshot import RecordedStep, read_steps
from orchestrator.rollouts.rows import Row, StepEnd
from pipelinerl.messages import Sample, TerminalStatus
from pipelinerl.runtime.stage import Signal


@dataclasses.dataclass(slots=True, kw_only=True)
class OpenStep:
    """A step that is not trained yet, or that is trained again."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    quarantined: frozenset[int] = frozenset()
    """Numbers of the rows that are not sent again: a zero-loss row takes the place of each."""
    end: StepEnd | None = None
    """The end of the step; None until the step has all its rows."""
    num_bytes: int = 0
    """Bytes of the rows."""

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.num_bytes += row.num_bytes

    @property
    def samples(self) -> list[Sample]:
        """The samples of the rows that are not quarantined."""
        return [sample for number, row in enumerate(self.rows) if number not in self.quarantined for sample in row.samples]


class OpenSteps:
    """The open steps by number, and how far the trainer is."""

    def __init__(self, ledger: Ledger, *, num_booked: int = 0, recorded: Mapping[int, RecordedStep] | None = None) -> None:
        """Begin after `num_booked` steps that were done before this orchestrator started; `recorded` holds the packed rows of later
        steps.
        """
        self.open: dict[int, OpenStep] = {number: _open(number, step) for number, step in (recorded or {}).items()}
        self.num_booked = num_booked
        """Steps that the ledger has as done."""
        self.num_done = 0
        """Steps that are in the trainer's weights; fewer than `num_booked` while it trains some again."""
        self.moved_on = Signal()
        """Set when `num_done` has changed."""
        self._ledger = ledger

    def add(self, item: Row | StepEnd) -> None:
        """Add a row, or the end of a step."""
        step = self.open.setdefault(item.step, OpenStep())
        if isinstance(item, StepEnd):
            step.end = item
        else:
            step.add(item)

    @property
    def next(self) -> OpenStep | None:
        """The step that the trainer does next; None before its first row."""
        return self.open.get(self.num_done)

    @property
    def num_closed(self) -> int:
        """Steps that have all their rows, trained or not."""
        return max(self.num_booked, *(number + 1 for number, step in self.open.items() if step.end is not None), 0)

    @property
    def num_bytes_ahead(self) -> int:
        """Bytes of the rows of steps after the next one."""
        return sum(step.num_bytes for number, step in self.open.items() if number > self.num_done)

    def keys_not_trained(self) -> set[str]:
        """Return the rows, as `step/row`, of steps that the ledger does not have as done."""
        return {f"{number}/{row}" for number, step in self.open.items() for row in range(len(step.rows)) if number >= self.num_booked}

    def record_trained(self, step: int, *, now_s: float) -> None:
        """Have a step's samples end as trained."""
        with self._ledger.transaction():
            for sample in self.open.pop(step).samples:
                summary = summary_of(sample.trajectory, reward=sample.reward, step=step)
                self._ledger.end(sample.trajectory.rollout_id, TerminalStatus.TRAINED, now_s=now_s, summary=summary)
            self._ledger.record("done", now_s=now_s, step=step)
        self.num_booked += 1

    def advance(self) -> None:
        """Note that the next step is in the trainer's weights."""
        self.num_done += 1
        self.moved_on.set()

    async def reopen(self, version: int) -> None:
        """Read trained steps from `version` on again: the trainer goes on from a checkpoint that does not hold them."""
        if version >= self.num_booked:
            return
        end = min(self.num_booked, min(self.open, default=self.num_booked))
        read = functools.partial(read_steps, self._ledger, first=version, end=end)
        recorded = await asyncio.get_running_loop().run_in_executor(None, read)
        self.open |= {number: _open(number, step) for number, step in recorded.items()}

    def go_on_from(self, version: int) -> None:
        """Note that the trainer's weights hold `version` steps; the rows of those are dropped."""
        for step in [step for step in self.open if step < version]:
            del self.open[step]
        self.num_done = version
        self.moved_on.set()


def _open(number: int, recorded: RecordedStep) -> OpenStep:
    end = None
    if recorded.closed is not None:
        num_tokens, num_samples, commit = recorded.closed
        end = StepEnd(step=number, num_tokens=num_tokens, num_samples=num_samples, commit=commit)
    step = OpenStep(quarantined=recorded.quarantined_rows, end=end)
    for samples in recorded.rows:
        step.add(Row(step=number, samples=samples))
    return step
