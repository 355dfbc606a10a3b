"""What became of every rollout of a simulated run, in the counts of the live one, and the identity that must hold at any moment."""

from __future__ import annotations

import collections

from orchestrator.ledger.rollouts import RUN_ENDED, Counts
from pipelinerl.messages import TerminalStatus


class Books:
    """Counts rollouts. Raises `KeyError` where one ends that is not in flight: it was never admitted, or ended before."""

    def __init__(self) -> None:
        self.reasons: collections.Counter[str] = collections.Counter()
        """Rollouts that were not trained, by `status: reason`."""
        self.in_flight: dict[str, None] = {}
        self._num_admitted = 0
        self._ended: collections.Counter[TerminalStatus] = collections.Counter()

    def admit(self, name: str) -> None:
        """Note that a rollout is sent to an engine for the first time."""
        self._num_admitted += 1
        self.in_flight[name] = None

    def end(self, name: str, status: TerminalStatus, reason: str = "") -> None:
        """Note that a rollout ended."""
        del self.in_flight[name]
        self._ended[status] += 1
        if status is not TerminalStatus.TRAINED:
            self.reasons[f"{status}: {reason}"] += 1

    def finish(self) -> Counts:
        """End everything still in flight as cancelled; return the final counts."""
        for name in list(self.in_flight):
            self.end(name, TerminalStatus.CANCELLED, RUN_ENDED)
        return self.counts()

    def counts(self) -> Counts:
        """Return the counts of this moment. Raises `RuntimeError` where they do not add up."""
        ended = {str(status): self._ended[status] for status in TerminalStatus}
        counts = Counts(admitted=self._num_admitted, in_flight=len(self.in_flight), **ended)
        if not counts.holds:
            raise RuntimeError(f"conservation is broken: {counts}")
        return counts
