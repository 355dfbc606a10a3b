"""Decides when a process that was killed is started again: at once, later, or not any more.

Only what was killed is restarted: a signal (the kernel short of memory, an operator, a crash in native code) says nothing of what the next
process will do. One that ends by an error of its own would most likely do so again, and its words would be lost in a loop.
"""

from __future__ import annotations

import collections

REJOIN_AFTER_S = 30.0
"""A process that ended well was told to; where the orchestrator lives on for so long, that was one that has been killed since, and the
process is started again. Must exceed what an orchestrator takes to end once it has told everyone.
"""
WINDOW_S = 3600.0
"""Restarts older than this are forgotten: a run of weeks outlives a bad hour now and then. Longer ends it for old troubles."""
MAX_WAIT_S = 60.0
"""Longest wait before a restart. Longer leaves a healed machine idle."""
HEALTHY_S = 60.0
"""A process that lived so long starts the doubling anew."""


class Restarts:
    """The restarts of one process: a budget, and a wait that doubles while deaths follow quickly."""

    def __init__(self, *, budget: int, first_wait_s: float) -> None:
        """`budget` restarts within `WINDOW_S`."""
        self.count = 0
        """Restarts granted so far."""
        self._budget = budget
        self._first_wait_s = first_wait_s
        self._granted_at: collections.deque[float] = collections.deque()
        self._num_quick = 0

    def next_wait(self, *, now_s: float, lived_s: float) -> float | None:
        """Seconds to wait before the process is started again, after one that lived `lived_s`; None where the budget is spent."""
        while self._granted_at and now_s - self._granted_at[0] > WINDOW_S:
            self._granted_at.popleft()
        if len(self._granted_at) >= self._budget:
            return None
        self._granted_at.append(now_s)
        self.count += 1
        self._num_quick = 1 if lived_s >= HEALTHY_S else self._num_quick + 1
        return min(MAX_WAIT_S, self._first_wait_s * 2 ** (self._num_quick - 1))
