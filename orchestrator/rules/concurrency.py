"""How many rollouts may be in engines at once, by how full their KV caches are: as many as fit, and none that push others out.

An engine whose cache is full takes the cache of one sequence away to go on with the others, and computes it again later: work done twice.
How many fit depends on how long completions are, which changes while a policy learns. So the limit follows the fullest engine: above
`FULL` it falls by a tenth of what is there, and waits until that has drained; below `ROOM`, where it is what holds admission back, it rises
by one group at each report. Falling in parts and rising in steps finds the edge, stays near it, and cannot swing (AIMD).
"""

from __future__ import annotations

FULL = 0.99
"""Part of a KV cache in use above which sequences are about to be pushed out. Higher notices too late: sequences grow between reports."""
ROOM = 0.9
"""Part below which another group fits. Higher swings around the edge; lower leaves cache unused."""
CUT = 0.9
"""What a full cache leaves of the limit. Smaller empties engines; larger needs more rounds of pushing out."""


class Concurrency:
    """Holds the limit."""

    def __init__(self, *, most: int, least: int, group_size: int) -> None:
        """The limit is between `least` and `most`, with which it begins."""
        self.limit = most
        self._most = most
        self._least = min(least, most)
        self._group_size = group_size
        self._used: dict[int, float] = {}
        """By engine: what it said last, since the limit last fell."""
        self._held: dict[int, int] = {}
        """By engine: the rollouts it had then."""
        self._is_draining = False

    def reported(self, engine_id: int, *, kv_used: float, num_held: int, num_outstanding: int) -> None:
        """An engine says which part of its KV cache is in use, by how many rollouts; engines have so many in all by now.

        What was there when a cache was full tells how many fit; by the time it is heard, most may be gone, and admission closed.
        """
        self._used[engine_id], self._held[engine_id] = kv_used, num_held
        fullest = max(self._used.values())
        self._is_draining = self._is_draining and num_outstanding > self.limit
        if self._is_draining:
            return
        if fullest > FULL:
            self.limit = max(self._least, int(CUT * min(self.limit, max(num_outstanding, sum(self._held.values())))))
            self._is_draining = True
            self._used.clear()  # others said so before the limit fell: it is one and the same fullness
        elif fullest < ROOM and num_outstanding >= self.limit:
            self.limit = min(self._most, self.limit + self._group_size)

    def lost(self, engine_id: int) -> None:
        """An engine is gone: what it said holds no longer."""
        self._used.pop(engine_id, None)
        self._held.pop(engine_id, None)
