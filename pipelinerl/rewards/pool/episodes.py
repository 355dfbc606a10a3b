"""Decides which slot plays which episode of an environment with state, in place of `queue`. A rule: no clock, no socket, no process.

A slot holds one episode from its reset until it is ended: all tasks of the episode go there, one at a time, since the object that answers
them lives in the slot's process. A reset waits until a slot is free. Where a slot is lost, so is its episode: a task of an episode that no
slot holds is answered as lost, and the orchestrator has the episode begin again from its prompt.

The orchestrator asks for no more episodes at once than there are slots, so a reset waits only for the end of another, which has a deadline.
An episode that nobody has asked about for `MAX_IDLE_S` is ended, too: then nothing holds a slot for ever.
"""

from __future__ import annotations

import collections
import dataclasses

from pipelinerl.messages import Request
from pipelinerl.rewards.pool.limits import BreakerState
from pipelinerl.rewards.pool.queue import Ticket

MAX_IDLE_S = 3600.0
"""Seconds without a task after which an episode is ended. Less would end episodes whose engine takes long; more keeps forgotten ones."""


@dataclasses.dataclass(slots=True)
class _Slot:
    is_ready: bool = False
    rollout_id: str | None = None
    """The episode that its process holds; None where it is free."""
    began_with: Request | None = None
    """The request that the episode began with."""
    running: Ticket | None = None
    waiting: collections.deque[Ticket] = dataclasses.field(default_factory=collections.deque)
    since: float = 0.0
    """When its call began, or the last one ended."""


class EpisodeQueue:
    """The tasks of episodes that wait and run. Times are seconds on one clock of the caller's choice."""

    breaker = BreakerState.CLOSED

    def __init__(self, *, num_slots: int, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._slots = [_Slot() for _ in range(num_slots)]
        self._resets: collections.deque[Ticket] = collections.deque()
        self._lost: list[Ticket] = []
        self._next_id = 0

    @property
    def num_running(self) -> int:
        """Number of slots that are running a call."""
        return sum(slot.running is not None for slot in self._slots)

    def running_s(self, slot: int, now: float) -> float:
        """Return the seconds since the slot began its call; 0.0 where it runs none."""
        return now - self._slots[slot].since if self._slots[slot].running is not None else 0.0

    def add(self, request: Request) -> None:
        """Take a task of an episode."""
        task, slot = request.task, self._holder(request.task.rollout_id)
        ticket = self._ticket(request)
        if task.turns[0] is None:
            self.end(task.rollout_id)  # a reset that is asked for again begins anew
            self._resets.append(ticket)
        elif slot is None:
            self._lost.append(ticket)
        else:
            slot.waiting.append(ticket)

    def end(self, rollout_id: str) -> None:
        """End an episode: its environment is closed once its call under way has returned, and its slot is then free."""
        for ticket in self._resets:
            ticket.is_done |= ticket.request.task.rollout_id == rollout_id
        if (slot := self._holder(rollout_id)) is not None:
            self._close(slot)

    def end_all(self) -> None:
        """End every episode."""
        self._resets.clear()
        for slot in self._slots:
            if slot.rollout_id is not None:
                self._close(slot)

    def cancel(self, request_id: int) -> dict[int, tuple[int, ...]]:
        """Drop a request whose answer nobody wants any more."""
        held = (ticket for slot in self._slots for ticket in (slot.running, *slot.waiting) if ticket is not None and not ticket.closes)
        for ticket in (*self._resets, *self._lost, *held):
            ticket.is_done |= ticket.request.request_id == request_id
        return {}

    def open(self, slot: int) -> None:
        """Mark a slot whose worker has loaded the class."""
        self._slots[slot].is_ready = True

    def hand_out(self, now: float) -> dict[int, list[Ticket]]:
        """Return the tickets to send now, by slot: at most one for each."""
        handed: dict[int, list[Ticket]] = {}
        for index, slot in enumerate(self._slots):
            if not slot.is_ready or slot.running is not None:
                continue
            if slot.rollout_id is not None and not slot.waiting and now - slot.since >= MAX_IDLE_S:
                self._close(slot)
            if (ticket := self._next(slot)) is not None:
                slot.running, slot.since, ticket.slot = ticket, now, index
                handed[index] = [ticket]
        return handed

    def take_lost(self) -> list[Ticket]:
        """Return the tickets whose episodes no slot holds."""
        lost, self._lost = [ticket for ticket in self._lost if not ticket.is_done], []
        return lost

    def answered(self, slot: int, call_id: int, now: float, *, duration_s: float | None) -> Ticket | None:
        """Record that the slot's worker answered its call. Return the ticket where its answer is wanted.

        Raises `ValueError` where the worker answers anything else.
        """
        held = self._slots[slot]
        ticket = held.running
        if ticket is None or ticket.call_id != call_id:
            raise ValueError(f"slot {slot} answered call {call_id}, expected {'nothing' if ticket is None else ticket.call_id}")
        held.running, held.since = None, now
        if ticket.closes:
            held.rollout_id = held.began_with = None
        return None if ticket.is_done else ticket

    def ended(self, ticket: Ticket, now: float, *, is_failure: bool) -> bool:
        """Return false: no task of an episode is tried again."""
        return False

    def lose(self, slot: int) -> Ticket | None:
        """Empty a slot whose worker is gone, with its episode. Return the ticket that it was running, where its answer is wanted."""
        lost, self._slots[slot] = self._slots[slot], _Slot()
        self._lost += [ticket for ticket in lost.waiting if not ticket.closes]
        return None if lost.running is None or lost.running.is_done else lost.running

    def overdue(self, now: float) -> list[int]:
        """Return the slots whose call has run past the deadline."""
        return [index for index, slot in enumerate(self._slots) if slot.running is not None and now - slot.since >= self.deadline_s]

    def take_back(self, now: float) -> dict[int, tuple[int, ...]]:
        """Return nothing: a slot has no calls ahead of time."""
        return {}

    def wake_at(self) -> float | None:
        """Return the time at which `overdue` or `hand_out` will next return something by the passing of time; None where neither will."""
        times = [slot.since + self.deadline_s for slot in self._slots if slot.running is not None]
        times += [slot.since + MAX_IDLE_S for slot in self._slots if slot.running is None and slot.rollout_id is not None]
        return min(times, default=None)

    def _next(self, slot: _Slot) -> Ticket | None:
        """Return the next ticket of a slot that runs none: of its episode, or, where it is free, the next reset."""
        while slot.waiting:
            if not (ticket := slot.waiting.popleft()).is_done:
                return ticket
        while slot.rollout_id is None and self._resets:
            if not (ticket := self._resets.popleft()).is_done:
                slot.rollout_id, slot.began_with = ticket.request.task.rollout_id, ticket.request
                return ticket
        return None

    def _holder(self, rollout_id: str) -> _Slot | None:
        """Return the slot that holds an episode and does not end it."""
        return next((slot for slot in self._slots if slot.rollout_id == rollout_id and not _ends(slot)), None)

    def _close(self, slot: _Slot) -> None:
        if slot.began_with is not None and not _ends(slot):
            self._lost += slot.waiting
            slot.waiting = collections.deque([self._ticket(slot.began_with, closes=True)])

    def _ticket(self, request: Request, *, closes: bool = False) -> Ticket:
        self._next_id += 1
        return Ticket(call_id=self._next_id, request=request, closes=closes)


def _ends(slot: _Slot) -> bool:
    """True where the slot is about to close its episode."""
    return any(ticket.closes for ticket in (slot.running, *slot.waiting) if ticket is not None)
