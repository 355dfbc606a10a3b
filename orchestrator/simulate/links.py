"""How policies travel to engines: transfers share the sender's bandwidth evenly, and none is faster than its receiver.

All transfers under way have the same rate, min(receiver's, sender's / number of them), so one number, the bytes that each has been sent
since the run began (virtual time of processor sharing), says when every one ends.
"""

from __future__ import annotations

import heapq
import math

from orchestrator.simulate.events import Act, Event, Events


class Link:
    """The transfers of policies."""

    def __init__(self, events: Events, *, sender_rate: float = math.inf, receiver_rate: float = math.inf) -> None:
        """Rates are in bytes per second."""
        self._events = events
        self._sender_rate, self._receiver_rate = sender_rate, receiver_rate
        self._sent = 0.0
        """Bytes that a transfer under way all the time would have been sent."""
        self._since_s = 0.0
        self._heap: list[tuple[float, int, Act]] = []
        self._number = 0
        self._next: Event | None = None
        self._num_losses = 0

    def send(self, num_bytes: float, act: Act) -> None:
        """Begin a transfer; `act` is called at its end."""
        self._catch_up()
        self._number += 1
        heapq.heappush(self._heap, (self._sent + num_bytes, self._number, act))
        self._plan()

    def lose(self, seconds: float) -> None:
        """Have nothing pass for some seconds; transfers then go on where they were."""
        self._catch_up()
        self._num_losses += 1
        self._events.after(seconds, self._return)
        self._plan()

    def _return(self) -> None:
        self._catch_up()
        self._num_losses -= 1
        self._plan()

    @property
    def _rate(self) -> float:
        return 0.0 if self._num_losses else min(self._receiver_rate, self._sender_rate / max(1, len(self._heap)))

    def _catch_up(self) -> None:
        elapsed_s, self._since_s = self._events.now_s - self._since_s, self._events.now_s
        if self._heap and elapsed_s > 0 and self._rate > 0:
            self._sent = min(self._sent + elapsed_s * self._rate, self._heap[0][0])

    def _plan(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._heap and self._rate > 0:
            self._next = self._events.after(max(0.0, self._heap[0][0] - self._sent) / self._rate, self._arrive)

    def _arrive(self) -> None:
        self._next = None
        self._since_s = self._events.now_s
        number, _, act = self._heap[0]
        self._sent = number
        heapq.heappop(self._heap)
        self._plan()
        act()
