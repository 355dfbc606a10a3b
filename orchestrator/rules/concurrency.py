"""This rule limits the rollouts in engines at once by how full the KV caches are: as many as fit, and none that evict others.

An engine whose cache is full evicts the cache of one sequence to go on with the others, and computes it again later: work done twice. The
number that fits depends on how long completions are, which changes while a policy learns. So the limit follows the fullest engine. Above
`FULL` it falls by a tenth of the rollouts in engines, and waits until the excess has drained. Below `ROOM`, where the limit is what holds
admission back, it rises by one group at each report. Falling in parts and rising in steps finds the edge, stays near it, and cannot swing
(AIMD).
"""

from __future__ import annotations

FULL = 0.99
"""The part of a KV cache in use above which sequences are about to be evicted. A higher value notices too late: sequences grow between
reports.
"""
ROOM = 0.9
"""The part below which another group fits. A higher value swings around the edge; a lower one leaves cache unused."""
CUT = 0.9
"""The part of the limit that remains after a full cache. A smaller value empties engines; a larger one needs more rounds of eviction."""


class Concurrency:
    """The limit on rollouts in engines, and the reports that it follows."""

    def __init__(self, *, most: int, least: int, group_size: int) -> None:
        """Begin with the limit at `most`; it stays between `least` and `most`."""
        self.limit = most
        self._most = most
        self._least = min(least, most)
        self._group_size = group_size
        self._used: dict[int, float] = {}
        """The last report of each engine, by its id, since the limit last fell."""
        self._held: dict[int, int] = {}
        """The rollouts that each engine had at that report, by its id."""
        self._is_draining = False

    def reported(self, engine_id: int, *, kv_used: float, num_held: int, num_outstanding: int) -> None:
        """Note which part of its KV cache an engine uses, and for how many rollouts; `num_outstanding` are in all engines by now.

        The rollouts held when a cache was full tell how many fit; by the time the report arrives, most may be gone, and admission closed.
        """
        self._used[engine_id], self._held[engine_id] = kv_used, num_held
        fullest = max(self._used.values())
        self._is_draining = self._is_draining and num_outstanding > self.limit
        if self._is_draining:
            return
        if fullest > FULL:
            self.limit = max(self._least, int(CUT * min(self.limit, max(num_outstanding, sum(self._held.values())))))
            self._is_draining = True
            self._used.clear()  # other reports date from before the limit fell, and describe the same fullness
        elif fullest < ROOM and num_outstanding >= self.limit:
            self.limit = min(self._most, self.limit + self._group_size)

    def resize(self, *, most: int, least: int) -> None:
        """Take other bounds, as engines have joined or left. A limit that stood at its upper bound goes on standing there."""
        self.limit = most if self.limit == self._most else min(self.limit, most)
        self._most, self._least = most, min(least, most)

    def lost(self, engine_id: int) -> None:
        """Forget the report of an engine that is gone: it holds no longer."""
        self._used.pop(engine_id, None)
        self._held.pop(engine_id, None)
