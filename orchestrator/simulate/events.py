"""Simulated time: a heap of things to happen. Equal times happen in the order in which they were asked for, so a run repeats exactly."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from pipelinerl.errors import Stalled

Act = Callable[[], object]


class Event:
    """One thing that will happen, unless it is cancelled."""

    __slots__ = ("act",)

    def __init__(self, act: Act) -> None:
        self.act = act

    def cancel(self) -> None:
        """Have it not happen."""
        self.act = _nothing


class Events:
    """The simulated clock. `settle` is called after each moment at which something happened, once for all of it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_happened = 0
        self.settle: Act = _nothing
        self._heap: list[tuple[float, int, Event]] = []
        self._number = 0

    def at(self, time_s: float, act: Act) -> Event:
        """Have something happen at a time, now at the earliest."""
        self._number += 1
        event = Event(act)
        heapq.heappush(self._heap, (max(time_s, self.now_s), self._number, event))
        return event

    def after(self, seconds: float, act: Act) -> Event:
        """Have something happen after some seconds."""
        return self.at(self.now_s + seconds, act)

    def run(self, *, until: Callable[[], bool], limit_s: float) -> None:
        """Let things happen until `until` says so. Raises `Stalled` where nothing is left to happen before, or `limit_s` has passed."""
        heap = self._heap
        self.settle()
        while not until():
            while heap and heap[0][2].act is _nothing:
                heapq.heappop(heap)
            if not heap or heap[0][0] > limit_s:
                left = "nothing is left to happen" if not heap else f"{limit_s:,.0f} simulated seconds have passed (--limit-s)"
                raise Stalled(f"the simulated run does not end: {left} at {self.now_s:,.1f} s")
            now_s = self.now_s = heap[0][0]
            while heap and heap[0][0] <= now_s:
                act = heapq.heappop(heap)[2].act
                self.num_happened += act is not _nothing
                act()
            self.settle()


def _nothing() -> None:
    """Stand for an event that was cancelled."""
