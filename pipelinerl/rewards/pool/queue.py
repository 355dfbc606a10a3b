"""Decides which call goes to which slot, and which call fails when a slot is lost. A rule: no clock, no socket, no process.

Calls are handed over ahead of time, as many as run in `AHEAD_S` at the mean speed so far, so that a fast reward function never waits
for the next message and nothing queues behind a slow one. A worker answers in order, so the first call of a slot is the one it is
running: the deadline applies to that call only, and only that call fails when the worker is killed or dies. The calls behind it are
handed out once more, at the front of the queue, and only to a slot that has nothing else: a failure there is surely their own, so no call
is handed out a third time. They are also taken back from a slot whose first call runs for `OVERRUN_S`, so that they need not wait for its
deadline.

A slot with `batch` takes up to so many calls at once, when it holds none, and answers them together: the deadline is the batch's. When it
is lost, nobody knows over which of them, so all are handed out once more, each alone; only a call that was alone fails.

A function with a rate or retries has limits: none of its calls is handed over ahead of time, and each begins when rate limit and circuit
breaker allow it. A try that failed is repeated up to `retries` times, after a pause that doubles; it remains one request and gets one
answer.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools

from pipelinerl.messages import Request
from pipelinerl.rewards.pool.limits import BreakerState, CircuitBreaker, RateLimit

AHEAD_S = 0.005
"""Seconds of work handed to a slot ahead of time. A smaller value lets fast functions wait for messages; a larger one lets calls queue
behind one another."""
MAX_AHEAD = 32
"""Maximum number of calls handed over ahead of time; it bounds the calls that are repeated when a worker is lost."""
OVERRUN_S = 0.1
"""Duration of a first call after which the calls behind it are taken back. A smaller value takes calls back for an ordinary pause of the
system; a larger one lets them wait longer."""
RETRY_AFTER_S = 0.5
"""Pause before the first retry; it doubles. A shorter one repeats during the same disturbance; a longer one holds the group open."""
_MEMORY = 0.1
"""Weight of the newest call in the mean duration."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """One request, from its arrival to its answer."""

    call_id: int
    request: Request
    slot: int | None = None
    """Slot that is to answer it; None while it waits."""
    is_rerun: bool = False
    """True where it was handed out once before."""
    num_tries: int = 0
    """Number of tries that failed."""
    is_done: bool = False
    """True where it is answered, or nobody wants the answer any more."""
    closes: bool = False
    """True where it closes the environment that its request began."""


@dataclasses.dataclass(slots=True)
class _Slot:
    is_ready: bool = False
    held: collections.deque[Ticket] = dataclasses.field(default_factory=collections.deque)
    """Calls that its worker has and will answer, in order, including withdrawn ones."""
    began_at: float = 0.0
    """Time at which its first call began."""
    has_given_back: bool = False
    """True where the calls behind its first call were taken back."""

    @property
    def has_tail(self) -> bool:
        return len(self.held) > 1 and not self.has_given_back

    def overruns(self, now: float) -> bool:
        return bool(self.held) and now - self.began_at >= OVERRUN_S


class Queue:
    """The requests that wait and run. Times are seconds on one clock of the caller's choice."""

    def __init__(
        self, *, num_slots: int, deadline_s: float, per_s: float | None = None, retries: int = 0, batch: int | None = None
    ) -> None:
        self.deadline_s = deadline_s
        self._batch = batch
        self._breaker = CircuitBreaker() if retries else None
        self._limits = [limit for limit in (RateLimit(per_s) if per_s else None, self._breaker) if limit is not None]
        self._retries = retries
        self._slots = [_Slot() for _ in range(num_slots)]
        self._waiting: collections.deque[Ticket] = collections.deque()
        self._later: list[tuple[float, int, Ticket]] = []
        """Tickets to be tried again, as a heap of (time, id, ticket)."""
        self._wanted: dict[int, Ticket] = {}
        self._next_id = 0
        self._mean_s: float | None = None

    @property
    def breaker(self) -> BreakerState:
        """State of the circuit breaker; closed where there is none."""
        return BreakerState.CLOSED if self._breaker is None else self._breaker.state

    @property
    def num_running(self) -> int:
        """Number of slots that are running a call."""
        return sum(bool(slot.held) for slot in self._slots)

    def running_s(self, slot: int, now: float) -> float:
        """Return the seconds since the slot began its first call; 0.0 where it runs none."""
        return now - self._slots[slot].began_at if self._slots[slot].held else 0.0

    def add(self, request: Request) -> None:
        """Take a request."""
        ticket = Ticket(call_id=self._next_id, request=request)
        self._next_id += 1
        self._wanted[request.request_id] = ticket
        self._waiting.append(ticket)

    def cancel(self, request_id: int) -> dict[int, tuple[int, ...]]:
        """Drop a request whose answer nobody wants any more. Return, by slot, the calls that its worker should be told to skip; a call that
        is running runs on.
        """
        ticket = self._wanted.pop(request_id, None)
        if ticket is None:
            return {}
        ticket.is_done = True
        is_queued = ticket.slot is not None and self._slots[ticket.slot].held[0] is not ticket
        return {ticket.slot: (ticket.call_id,)} if ticket.slot is not None and is_queued else {}

    def open(self, slot: int) -> None:
        """Mark a slot whose worker has loaded its functions and takes calls."""
        self._slots[slot].is_ready = True

    def close(self, slot: int) -> None:
        """Hand a slot no more calls; it keeps those that it has, until it is opened again."""
        self._slots[slot].is_ready = False

    def num_held(self, slot: int) -> int:
        """Return the number of calls that a slot has."""
        return len(self._slots[slot].held)

    def hand_out(self, now: float) -> dict[int, list[Ticket]]:
        """Return the tickets to send now, by slot. Each goes to the slot that holds the fewest calls, and only as far ahead as allowed.

        A slot is filled up once it is half empty: a few calls in one message cost little more than one.
        """
        while self._later and self._later[0][0] <= now:
            self._waiting.appendleft(heapq.heappop(self._later)[2])
        handed: dict[int, list[Ticket]] = {}
        room = self._batch or 1 + self._num_ahead()
        most_held = 0 if self._batch else room // 2
        slots = [
            index for index, slot in enumerate(self._slots) if slot.is_ready and len(slot.held) <= most_held and not slot.overruns(now)
        ]
        while self._waiting and slots:
            ticket = self._waiting[0]
            if ticket.is_done:
                self._waiting.popleft()
                continue
            if now < self._opens_at():
                break
            index = min(slots, key=lambda index: len(self._slots[index].held))
            slot = self._slots[index]
            if len(slot.held) >= (1 if ticket.is_rerun or self._holds_one_alone(slot) else room):
                break
            if not slot.held:
                slot.began_at = now
            ticket.slot = index
            for limit in self._limits:
                limit.began(now)
            slot.held.append(self._waiting.popleft())
            handed.setdefault(index, []).append(ticket)
        return handed

    def answered(self, slot: int, call_id: int, now: float, *, duration_s: float | None) -> Ticket | None:
        """Record that the slot's worker answered its first call, or skipped it (no duration). Return the ticket where its answer is wanted.

        Raises `ValueError` where the worker answers anything but its first call.
        """
        held = self._slots[slot].held
        if not held or held[0].call_id != call_id:
            raise ValueError(f"slot {slot} answered call {call_id}, expected {held[0].call_id if held else 'nothing'}")
        ticket = held.popleft()
        self._slots[slot].began_at, self._slots[slot].has_given_back = now, False
        if duration_s is None or ticket.is_done:
            return None
        self._mean_s = duration_s if self._mean_s is None else (1 - _MEMORY) * self._mean_s + _MEMORY * duration_s
        return self._finish(ticket)

    def ended(self, ticket: Ticket, now: float, *, is_failure: bool) -> bool:
        """Record how a ticket ended that the caller got as finished. Return true where it failed and is queued for another try."""
        if self._breaker is not None:
            self._breaker.ended(now, is_failure=is_failure)
        if not is_failure or ticket.num_tries >= self._retries:
            return False
        due = now + RETRY_AFTER_S * 2**ticket.num_tries
        ticket.num_tries += 1
        ticket.slot, ticket.is_rerun, ticket.is_done = None, False, False
        self._wanted[ticket.request.request_id] = ticket
        heapq.heappush(self._later, (due, ticket.call_id, ticket))
        return True

    def lose(self, slot: int) -> Ticket | None:
        """Empty a slot whose worker is gone. Return the ticket that fails, the one it was running; those behind it, or a whole batch, wait
        again, at the front.
        """
        lost = self._slots[slot]
        charged = lost.held[0] if lost.held else None
        if self._batch and charged is not None and not charged.is_rerun:
            self._put_back(list(lost.held))
            charged = None
        else:
            self._put_back(self._behind(slot))
        self._slots[slot] = _Slot()
        return self._finish(charged) if charged is not None and not charged.is_done else None

    def release(self, slot: int) -> None:
        """Empty a slot whose worker is ended on purpose: its calls wait again, at the front, and none of them is suspected."""
        for ticket in reversed(self._slots[slot].held):
            if ticket.slot == slot:
                ticket.slot = None
                self._waiting.appendleft(ticket)
        self._slots[slot] = _Slot()

    def overdue(self, now: float) -> list[int]:
        """Return the slots whose first call has run past the deadline."""
        return [index for index, slot in enumerate(self._slots) if slot.held and now - slot.began_at >= self.deadline_s]

    def take_back(self, now: float) -> dict[int, tuple[int, ...]]:
        """Take back the calls behind one that overruns, so that they wait again. Return, by slot, the calls that its worker should be told
        to skip.
        """
        taken: dict[int, tuple[int, ...]] = {}
        for index, slot in enumerate(() if self._batch else self._slots):
            if slot.has_tail and slot.overruns(now):
                slot.has_given_back = True
                behind = self._behind(index)
                self._put_back(behind)
                taken[index] = tuple(ticket.call_id for ticket in behind)
        return taken

    def wake_at(self) -> float | None:
        """Return the time at which `overdue`, `take_back` or, by the passing of time alone, `hand_out` will next return something; None
        where none of them will.
        """
        times = [
            slot.began_at + (min(OVERRUN_S, self.deadline_s) if slot.has_tail and not self._batch else self.deadline_s)
            for slot in self._slots
            if slot.held
        ]
        if any(slot.is_ready and not slot.held for slot in self._slots):
            if self._waiting and self._limits:
                times.append(self._opens_at())
            if self._later:
                times.append(self._later[0][0])
        return min(times, default=None)

    def _opens_at(self) -> float:
        return max((limit.opens_at for limit in self._limits), default=float("-inf"))

    def _num_ahead(self) -> int:
        return 0 if self._mean_s is None or self._limits else min(MAX_AHEAD, int(AHEAD_S / max(self._mean_s, 1e-9)))

    def _holds_one_alone(self, slot: _Slot) -> bool:
        """True where a slot has a call that was in a lost batch, and is to be by itself."""
        return bool(self._batch and slot.held and slot.held[0].is_rerun)

    def _behind(self, slot: int) -> list[Ticket]:
        """Return the tickets queued in a slot behind its first one that were not taken back."""
        held = itertools.islice(self._slots[slot].held, 1, None)
        return [ticket for ticket in held if ticket.slot == slot]

    def _put_back(self, tickets: list[Ticket]) -> None:
        for ticket in reversed(tickets):
            ticket.slot, ticket.is_rerun = None, True
            self._waiting.appendleft(ticket)

    def _finish(self, ticket: Ticket) -> Ticket:
        ticket.is_done = True
        self._wanted.pop(ticket.request.request_id, None)
        return ticket
