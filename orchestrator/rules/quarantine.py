"""Which prompts may be what kills their peers? One that is there at two deaths in a row is not sampled again.

A death names nobody: every prompt that was with the peer is a suspect. From then on at most one suspect may be with a peer at a time, so a
second death has one suspect at most, which is quarantined; one that comes through is cleared. So a prompt that kills whoever serves it
costs two processes, and an innocent one is lost only where a peer dies for another reason in the very moment it is being cleared.

A prompt is known by its row in the source, so that it stays quarantined in every epoch, and, by the ledger, across restarts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

MAX_DEATHS = 2
"""1 would condemn every prompt of an engine that runs out of memory once; 3 costs one more process for the same certainty."""


def row_of(prompt_id: str) -> str:
    """A prompt's row in its source: `3:17` is row 17, drawn in epoch 3."""
    return prompt_id.rpartition(":")[2]


class Quarantine:
    """Counts deaths by prompt."""

    def __init__(self, deaths: Mapping[str, int] | None = None) -> None:
        """`deaths` are those of earlier lives of the run."""
        self._deaths = dict(deaths or {})

    def holds(self, prompt_id: str) -> bool:
        """True where a prompt must not be sampled."""
        return self._deaths.get(row_of(prompt_id), 0) >= MAX_DEATHS

    def is_suspect(self, prompt_id: str) -> bool:
        """True where a prompt was there at a death, and has not come through since."""
        return 0 < self._deaths.get(row_of(prompt_id), 0) < MAX_DEATHS

    def died(self, prompt_ids: Collection[str]) -> list[str]:
        """A peer died that had these prompts; return the rows quarantined for it."""
        rows = sorted({row_of(prompt_id) for prompt_id in prompt_ids})
        for row in rows:
            self._deaths[row] = self._deaths.get(row, 0) + 1
        return [row for row in rows if self._deaths[row] == MAX_DEATHS]

    def came_through(self, prompt_id: str) -> bool:
        """All of a prompt's rollouts were answered; return whether it was a suspect."""
        was_suspect = self.is_suspect(prompt_id)
        if was_suspect:
            del self._deaths[row_of(prompt_id)]
        return was_suspect
