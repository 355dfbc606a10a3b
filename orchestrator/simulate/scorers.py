"""Calls that are served by slots, in the order in which they came: rewards, environments, and the batches of a process reward model."""

from __future__ import annotations

import collections

from orchestrator.simulate.events import Act, Events


class Slots:
    """So many calls at once; the others wait."""

    def __init__(self, events: Events, *, num_slots: int) -> None:
        self.num_running = 0
        self.num_done = 0
        self.busy_s = 0.0
        """Seconds of calls that ended, summed over slots."""
        self.slowness = 1.0
        """Factor on the seconds of calls that begin now."""
        self._events = events
        self.num_slots = num_slots
        """It may change; calls under way go on."""
        self._waiting: collections.deque[tuple[float, Act]] = collections.deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def call(self, seconds: float, act: Act) -> None:
        """Ask for a call of so many seconds; `act` is called at its end."""
        self._waiting.append((seconds, act))
        self._begin()

    def _begin(self) -> None:
        while self._waiting and self.num_running < self.num_slots:
            seconds, act = self._waiting.popleft()
            self.num_running += 1
            lasts_s = seconds * self.slowness
            self._events.after(lasts_s, lambda lasts_s=lasts_s, act=act: self._end(lasts_s, act))

    def _end(self, lasts_s: float, act: Act) -> None:
        self.num_running -= 1
        self.num_done += 1
        self.busy_s += lasts_s
        self._begin()
        act()
