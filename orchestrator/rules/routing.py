"""Routing chooses the engine that generates a group: the one with the fewest rollouts outstanding. Siblings stay together.

Siblings share their prompt, so on one engine its prefix is computed once. Balance counts rollouts, not tokens: lengths are unknown
beforehand, and the count corrects itself with every finished rollout.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Iterable, Mapping


def route(outstanding: Mapping[int, int]) -> int | None:
    """Return the engine for the next group, given each serving engine's outstanding rollouts; ties go to the lowest id, None if none
    serves.
    """
    return min(outstanding, key=lambda engine_id: (outstanding[engine_id], engine_id), default=None)


class Loads:
    """The serving engines by version and by outstanding rollouts; no answer takes longer with more engines."""

    def __init__(self) -> None:
        self._now: dict[int, tuple[int, int]] = {}
        """(version, outstanding) of each engine."""
        self._heaps: dict[int, list[tuple[int, int]]] = {}
        """Entries (outstanding, engine id) by version, including outdated ones."""
        self._num_engines: collections.Counter[int] = collections.Counter()
        """The number of engines by version."""

    def note(self, engine_id: int, *, version: int, outstanding: int) -> None:
        """Note the outstanding rollouts of an engine and the version it samples under."""
        if self._now.get(engine_id, (None, 0))[0] != version:
            self.forget(engine_id)
            self._num_engines[version] += 1
        self._now[engine_id] = (version, outstanding)
        heap = self._heaps.setdefault(version, [])
        heapq.heappush(heap, (outstanding, engine_id))
        if len(heap) > 64 + 4 * self._num_engines[version]:
            heap[:] = [(outstanding, engine_id) for engine_id, (held, outstanding) in self._now.items() if held == version]
            heapq.heapify(heap)

    def forget(self, engine_id: int) -> None:
        """Note that an engine serves no more, if it did."""
        before = self._now.pop(engine_id, None)
        if before is None:
            return
        version, _ = before
        self._num_engines[version] -= 1
        if not self._num_engines[version]:
            del self._num_engines[version], self._heaps[version]

    def knows(self, engine_id: int) -> bool:
        """Return whether the engine serves."""
        return engine_id in self._now

    def versions(self) -> list[int]:
        """Return the versions that engines hold, each once."""
        return list(self._num_engines)

    def least_busy(self, versions: Iterable[int]) -> int | None:
        """Return the engine that `route` would choose among those that hold one of `versions`."""
        tops = [top for version in versions if (top := self._top(version)) is not None]
        return min(tops)[1] if tops else None

    def _top(self, version: int) -> tuple[int, int] | None:
        heap = self._heaps.get(version, [])
        while heap and self._now.get(heap[0][1]) != (version, heap[0][0]):
            heapq.heappop(heap)
        return heap[0] if heap else None
