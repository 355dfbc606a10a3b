"""Decides which processes of one supervisor are started again, and when: at once, later, or not any more.

Only what was killed is restarted: a signal (the kernel short of memory, an operator, a crash in native code) says nothing of what the next
process will do. One that ends by an error of its own would most likely do so again, and its words would be lost in a loop. One that ended
well was told to; where the orchestrator lives on, it was told by one that has been killed since, and it is started again, too.
"""

from __future__ import annotations

import collections

REJOIN_AFTER_S = 30.0
"""A process that ended well so long ago is started again. Must exceed what an orchestrator takes to end once it has told everyone."""
WINDOW_S = 3600.0
"""Restarts older than this are forgotten: a run of weeks outlives a bad hour now and then. Longer ends it for old troubles."""
MAX_WAIT_S = 60.0
"""Longest wait before a restart. Longer leaves a healed machine idle."""
HEALTHY_S = 60.0
"""A process that lived so long starts the doubling anew."""


class Restarts:
    """The restarts of processes by name: a budget for each, and a wait that doubles while deaths follow quickly. Times: Unix seconds."""

    def __init__(self, *, budget: int, first_wait_s: float) -> None:
        """`budget` restarts of each process within `WINDOW_S`."""
        self._budget = budget
        self._first_wait_s = first_wait_s
        self._granted_at: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
        self._num_quick: collections.Counter[str] = collections.Counter()
        self._left_at: dict[str, float] = {}
        """The processes that ended well, and when."""

    def count(self, name: str) -> int:
        """The restarts granted to a process so far."""
        return len(self._granted_at[name])

    def next_wait(self, name: str, *, now_s: float, started_s: float) -> float | None:
        """Seconds to wait before a killed process is started again; None where its budget is spent."""
        granted_at = self._granted_at[name]
        if sum(now_s - at_s <= WINDOW_S for at_s in granted_at) >= self._budget:
            return None
        granted_at.append(now_s)
        self._num_quick[name] = 1 if now_s - started_s >= HEALTHY_S else self._num_quick[name] + 1
        return min(MAX_WAIT_S, self._first_wait_s * 2 ** (self._num_quick[name] - 1))

    def ended_well(self, name: str, *, now_s: float) -> None:
        """Note that a process has ended as it was told."""
        self._left_at[name] = now_s

    def rejoining(self, *, now_s: float) -> list[str]:
        """Name the processes that ended well too long ago for a run that ends; each once."""
        due = [name for name, left_at in self._left_at.items() if now_s - left_at > REJOIN_AFTER_S]
        for name in due:
            del self._left_at[name]
        return due
