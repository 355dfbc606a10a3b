"""Calls that are served by slots, in the order in which they came: rewards, environments, and the batches of a process reward model."""

from __future__ import annotations

import collections

from orchestrator.simulate.cores import Cores
from orchestrator.simulate.events import Act


class Slots:
    """So many calls at once; the others wait."""

    def __init__(self, cores: Cores, *, kind: str, num_slots: int) -> None:
        """`kind` is that of its calls among the jobs that share `cores`."""
        self.num_running = 0
        self.num_done = 0
        self.busy_s = 0.0
        """Seconds of calls that ended, summed over slots."""
        self.slowness = 1.0
        """Factor on the seconds of calls that begin now."""
        self._cores, self._kind = cores, kind
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
            self._cores.start(self._kind, lasts_s, lambda lasts_s=lasts_s, act=act: self._end(lasts_s, act))

    def _end(self, lasts_s: float, act: Act) -> None:
        self.num_running -= 1
        self.num_done += 1
        self.busy_s += lasts_s
        self._begin()
        act()
