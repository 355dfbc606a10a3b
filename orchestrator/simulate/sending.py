"""Groups are sent one after another: the live loop prepares each for so many seconds, and hears no peer until none is left to send.

So the first engine that holds a new policy gets all that may be sent then; another one that has it staged a few milliseconds later is heard
of afterwards. Only what comes at the same moment while nothing is sent is heard together.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.simulate.events import Events


class Sending:
    """When the next group may be sent, and what waits for the last one."""

    def __init__(self, events: Events, *, each_s: float) -> None:
        """`each_s` are the seconds that the loop takes for a group."""
        self.next_s = 0.0
        self._events, self._each_s = events, each_s
        self._waiting: list[Callable[[], None]] = []

    @property
    def is_free(self) -> bool:
        """Whether the last group that was sent is prepared."""
        return self._events.now_s >= self.next_s

    def sent(self) -> None:
        """Note that a group is sent."""
        self.next_s = self._events.now_s + self._each_s

    def over(self) -> None:
        """Note that no further group may be sent: whoever waits is heard."""
        acts, self._waiting = self._waiting, []
        for act in acts:
            act()

    def when_over(self, act: Callable[[], None]) -> None:
        """Have something happen once the loop hears it."""
        self._waiting.append(act)
        if self.is_free and len(self._waiting) == 1:
            self._events.after(0.0, self._hear)

    def _hear(self) -> None:
        if self.is_free:
            self.over()
