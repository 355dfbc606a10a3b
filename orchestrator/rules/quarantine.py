"""The quarantine finds prompts that may kill their peers: one that was present at two deaths in a row is not sampled again.

A death does not tell its cause: every prompt that was with the peer is a suspect. From then on at most one suspect may be with a peer at a
time, so a second death has one suspect at most, which is quarantined; a suspect that comes through is cleared. So a prompt that kills every
peer serving it costs two processes, and an innocent one is lost only where a peer dies for another reason at the very moment the prompt is
being cleared.

A prompt is known by its row in the source, so that it stays quarantined in every epoch, and, by the ledger, across restarts.

Rows of samples can kill the trainer. It notes which rows it is computing, so each death has its suspects by name (`step/row`). These are
trained again from the same row, alone. A row that was being computed at two deaths is not sent again, and the step goes on without its
samples; the number that sums are divided by was counted before, as for anything that is rejected after that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pipelinerl.errors import DataError

MAX_DEATHS = 2
"""Deaths until a prompt is quarantined. 1 would quarantine every prompt of an engine that runs out of memory once; 3 costs one more process
for the same certainty.
"""
MAX_SKIPPED = 1000
"""Quarantined prompts drawn one after another before the run ends: more than by chance, so hardly any other prompt is left."""


def row_of(prompt_id: str) -> str:
    """Return a prompt's row in its source: `3:17` is row 17, drawn in epoch 3. The row of a step, `3/17`, is returned unchanged."""
    return prompt_id.rpartition(":")[2]


class Quarantine:
    """The quarantine counts deaths by role (engine, scorer, trainer) and prompt, or row of a step."""

    def __init__(self, deaths: Mapping[str, Mapping[str, int]] | None = None) -> None:
        """Begin with `deaths`, those of earlier processes of the run, by role and row."""
        self._deaths = {(role, row): count for role, rows in (deaths or {}).items() for row, count in rows.items()}
        self._held = {row for (_, row), count in self._deaths.items() if count >= MAX_DEATHS}
        self._num_skipped = 0
        """Prompts in a row that were drawn and must not be sampled."""

    def holds(self, prompt_id: str) -> bool:
        """Return whether a prompt must not be sampled or scored."""
        return row_of(prompt_id) in self._held

    def skips(self, prompt_id: str) -> bool:
        """Return whether a prompt that was drawn must not be sampled. Raises `DataError` at `MAX_SKIPPED` such prompts in a row."""
        self._num_skipped = self._num_skipped + 1 if self.holds(prompt_id) else 0
        if self._num_skipped >= MAX_SKIPPED:
            raise DataError(f"the last {self._num_skipped} prompts are all quarantined, each for killing two processes: see the ledger")
        return self._num_skipped > 0

    def is_suspect(self, role: str, prompt_id: str) -> bool:
        """Return whether a prompt was present when a peer of this role died, and has not come through one since."""
        return 0 < self._deaths.get((role, row_of(prompt_id)), 0) < MAX_DEATHS

    def died(self, role: str, prompt_ids: Collection[str]) -> list[str]:
        """Count the death of a peer that had these prompts; return the rows quarantined for it."""
        rows = sorted({row_of(prompt_id) for prompt_id in prompt_ids})
        for row in rows:
            self._deaths[role, row] = self._deaths.get((role, row), 0) + 1
        quarantined = [row for row in rows if self._deaths[role, row] == MAX_DEATHS]
        self._held.update(quarantined)
        return quarantined

    def came_through(self, role: str, prompt_id: str) -> bool:
        """Note that a peer of this role has answered everything asked for a prompt; return whether the prompt was a suspect."""
        was_suspect = self.is_suspect(role, prompt_id)
        if was_suspect:
            del self._deaths[role, row_of(prompt_id)]
        return was_suspect
