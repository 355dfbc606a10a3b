"""This module counts the deaths of peers against the prompts and rows they had, so that those that kill twice are not sent again, see
`rules.quarantine`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection, Sequence

from orchestrator.ledger.ledger import Ledger
from orchestrator.recovery.open_steps import OpenSteps
from orchestrator.rules.quarantine import Quarantine, row_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptSuspects:
    """The prompts that were with peers of one role when those died."""

    role: str
    quarantine: Quarantine
    ledger: Ledger

    def record_death(self, peer: str, prompt_ids: Collection[str]) -> None:
        """Suspect every prompt that a peer had when it died, and quarantine those that were suspects already."""
        for prompt_id in sorted(prompt_ids):
            self.ledger.record("suspected", now_s=_now_s(), peer=peer, suspect=row_of(prompt_id))
        for row in self.quarantine.died(self.role, prompt_ids):
            self.ledger.record("quarantined", now_s=_now_s(), peer=peer, suspect=row)
        self.ledger.flush()  # seldom, and it must outlive this process: the prompt may be what ends that, too

    def clear(self, peer: str, prompt_id: str) -> bool:
        """Clear a prompt, since a peer has answered everything asked for it; return whether the prompt was a suspect."""
        was_suspect = self.quarantine.came_through(self.role, prompt_id)
        if was_suspect:
            self.ledger.record("cleared", now_s=_now_s(), peer=peer, suspect=row_of(prompt_id))
        return was_suspect


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowSuspects:
    """The rows of open steps that the trainer was computing when it died."""

    steps: OpenSteps
    quarantine: Quarantine
    ledger: Ledger

    def record_death(self, rows: Sequence[str]) -> None:
        """Suspect the rows (`step/row`) that a trainer was computing. A row that was present twice is not sent again; a trained row is no
        suspect.
        """
        keys = sorted(self.steps.keys_not_trained().intersection(rows))
        now_s = _now_s()
        for key in keys:
            self.ledger.record("suspected", now_s=now_s, peer="trainer", suspect=key)
        for key in self.quarantine.died("trainer", keys):
            number, row = map(int, key.split("/"))
            step = self.steps.open[number]
            samples = step.rows[row].samples
            self.ledger.quarantine_row(number, row, samples, now_s=now_s)
            step.quarantined |= {row}
            named = ", ".join(f"{one.trajectory.rollout_id} (prompt {one.trajectory.prompt.prompt_id})" for one in samples)
            print(f"row {row} of step {number} killed the trainer twice: it is sent no more, its samples failed: {named}", flush=True)
        if keys:
            self.ledger.flush()  # it must outlive this process, too

    def clear(self, step: int) -> None:
        """Clear the rows of a step that is done."""
        for row in range(len(self.steps.open[step].rows)):
            if self.quarantine.came_through("trainer", key := f"{step}/{row}"):
                self.ledger.record("cleared", now_s=_now_s(), peer="trainer", suspect=key)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
