"""The slots of a scorer: a worker process each, fed by the rule in `queue`, killed at a deadline and replaced when it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import selectors
import socket
import time

from pipelinerl.errors import ConfigError, PeerSilent, WireError
from pipelinerl.messages import Message, Outcome, Score, Scored
from pipelinerl.metrics import Journal
from pipelinerl.scorer.calls import Call, Calling, Frames, FromWorker, Loaded, Refused, Result, Setup, Skipped, Withdraw, frame
from pipelinerl.scorer.queue import Queue, Ticket
from pipelinerl.scorer.sandbox import Sandbox
from pipelinerl.transport.codec import Decoder

LOAD_DEADLINE_S = 300.0
"""Longest wait for a worker to import the reward functions. Shorter fails functions that load a model; longer hides a hung import."""
_decoder: Decoder[Loaded | Refused | Calling | Skipped | Result] = Decoder(FromWorker)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Worker:
    """One worker process, as this side sees it."""

    worker_id: int
    channel: socket.socket
    frames: Frames
    born_at: float
    """Monotonic seconds."""
    names: tuple[str, ...] = ()
    """Of its reward functions; empty until it has loaded them."""
    calling: str = ""
    """The function it runs, or will run next."""
    outgoing: bytearray = dataclasses.field(default_factory=bytearray)
    """What the channel did not take yet."""
    waits_for_room: bool = False
    """The selector watches for room in the channel."""


class Pool:
    """Takes requests, gives answers; one thread, driven by `wait` and `advance`."""

    def __init__(self, setup: Setup, *, num_slots: int, deadline_s: float, journal: Journal, name: str) -> None:
        self.busy_s = 0.0
        """Seconds of finished calls, those that were killed included."""
        self._journal = journal
        self._name = name
        self._queue = Queue(num_slots=num_slots, deadline_s=deadline_s)
        self._answers: list[Scored] = []
        self._selector = selectors.DefaultSelector()
        self._sandbox = Sandbox(setup)
        self._has_ended = False
        """The fork server has something to tell."""
        self._workers: list[_Worker] = []
        self._num_slots = num_slots

    @property
    def num_running(self) -> int:
        return self._queue.num_running

    def total_busy_s(self) -> float:
        """Seconds of calls since the start, summed over slots, calls under way included."""
        now = time.monotonic()
        return self.busy_s + sum(self._queue.running_s(slot, now) for slot in range(self._num_slots))

    def start(self) -> None:
        """Start every worker and wait until all have loaded the reward functions. Raises `ConfigError` where that fails."""
        self._sandbox.wait_until_prepared()
        self._selector.register(self._sandbox, selectors.EVENT_READ)
        for slot in range(self._num_slots):
            self._workers.append(self._spawn(slot))
        while not all(worker.names for worker in self._workers):
            self.wait(LOAD_DEADLINE_S)
            self.advance()

    def wake_on(self, descriptor: int) -> None:
        """Have `wait` return when this descriptor becomes readable, too."""
        self._selector.register(descriptor, selectors.EVENT_READ)

    def submit(self, score: Score) -> None:
        """Queue a request; it is handed to a worker by the next `advance`."""
        self._queue.add(score)

    def cancel(self, rollout_id: str, attempt: int) -> None:
        """Withdraw a request: no answer follows. A call under way runs on, its answer is dropped."""
        self._withdraw(self._queue.cancel(rollout_id, attempt))

    def cancel_all(self) -> None:
        """Withdraw every request, and what was answered and not returned by `advance` yet."""
        for rollout_id, attempt in self._queue.wanted():
            self.cancel(rollout_id, attempt)
        self._answers.clear()

    def wait(self, timeout_s: float) -> None:
        """Sleep until a worker, the fork server or a descriptor of `wake_on` has something, a deadline passes, or `timeout_s` is over."""
        wake_at = [worker.born_at + LOAD_DEADLINE_S for worker in self._workers if not worker.names]
        if (deadline := self._queue.wake_at()) is not None:
            wake_at.append(deadline)
        left_s = min(wake_at, default=float("inf")) - time.monotonic()
        for key, events in self._selector.select(max(0.0, min(timeout_s, left_s))):
            if key.fileobj is self._sandbox:
                self._has_ended = True
            if key.data is None:
                continue
            if events & selectors.EVENT_READ:
                self._read(key.data)
            if events & selectors.EVENT_WRITE:
                self._flush(key.data)

    def advance(self) -> list[Scored]:
        """Replace lost workers, kill those past a deadline, hand out what fits; return the answers since the last call."""
        if self._has_ended:
            self._has_ended = False
            for ended in self._sandbox.receive():
                for slot, worker in enumerate(self._workers):
                    if worker.worker_id == ended.worker_id:
                        self._bury(slot, ended.how)
        now = time.monotonic()
        for slot in self._queue.overdue(now):
            self._time_out(slot)
        for worker in self._workers:
            if not worker.names and now - worker.born_at >= LOAD_DEADLINE_S:
                raise PeerSilent(f"waited {LOAD_DEADLINE_S:g} s for a worker of {self._name} to import the reward functions")
        self._withdraw(self._queue.take_back(now))
        self._hand_out(now)
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """Kill every worker and end the fork server; requests without an answer are dropped."""
        self._selector.close()
        for worker in self._workers:
            worker.channel.close()
        self._sandbox.close()

    # --- workers ---

    def _spawn(self, slot: int) -> _Worker:
        worker_id, channel = self._sandbox.spawn()
        self._selector.register(channel, selectors.EVENT_READ, data=slot)
        return _Worker(worker_id=worker_id, channel=channel, frames=Frames(channel), born_at=time.monotonic())

    def _replace(self, slot: int) -> None:
        worker = self._workers[slot]
        with contextlib.suppress(KeyError):
            self._selector.unregister(worker.channel)
        worker.channel.close()
        self._workers[slot] = self._spawn(slot)

    def _bury(self, slot: int, how: str) -> None:
        """The worker of this slot ended by itself: charge the call it was running. What it answered before, the same `wait` has read."""
        worker = self._workers[slot]
        if not worker.names:
            raise ConfigError(f"a worker of {self._name} {how} while it imported the reward functions; see the scorer's log")
        ran_s = self._queue.running_s(slot, time.monotonic())
        self._charge(self._queue.lose(slot), slot, Outcome.ERROR, f"{worker.calling}: its process {how}", ran_s)
        self._replace(slot)

    def _time_out(self, slot: int) -> None:
        worker = self._workers[slot]
        self._sandbox.kill(worker.worker_id)
        ran_s = self._queue.running_s(slot, time.monotonic())
        error = f"{worker.calling} did not return within {self._queue.deadline_s:g} s; its process was killed"
        self._charge(self._queue.lose(slot), slot, Outcome.TIMEOUT, error, ran_s)
        self._replace(slot)

    def _charge(self, ticket: Ticket | None, slot: int, outcome: Outcome, error: str, ran_s: float) -> None:
        if ran_s:
            self._note(slot, time.time() - ran_s, ran_s)
        if ticket is not None:
            self._answer(ticket, outcome=outcome, error=error, duration_s=ran_s)

    # --- messages ---

    def _hand_out(self, now: float) -> None:
        for slot, tickets in self._queue.hand_out(now).items():
            self._send(slot, *map(_call, tickets))

    def _withdraw(self, tickets: dict[int, tuple[int, ...]]) -> None:
        for slot, ticket_ids in tickets.items():
            self._send(slot, Withdraw(ticket_ids=ticket_ids))

    def _send(self, slot: int, *messages: Message) -> None:
        outgoing = self._workers[slot].outgoing
        was_empty = not outgoing
        for message in messages:
            outgoing += frame(message)
        if was_empty:
            self._flush(slot)

    def _flush(self, slot: int) -> None:
        worker = self._workers[slot]
        try:
            del worker.outgoing[: worker.channel.send(worker.outgoing)]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            worker.outgoing.clear()  # the fork server will tell how it ended
        if bool(worker.outgoing) != worker.waits_for_room:
            worker.waits_for_room = bool(worker.outgoing)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outgoing else 0)
            with contextlib.suppress(KeyError):
                self._selector.modify(worker.channel, events, data=slot)

    def _read(self, slot: int) -> None:
        """Take in what a worker sent."""
        worker = self._workers[slot]
        try:
            bodies = worker.frames.receive()
            for body in bodies or ():
                self._hear(slot, _decoder.decode(body))
        except (ConnectionResetError, WireError, ValueError):  # the last two: reward code wrote into the channel
            bodies = None
        if bodies is None:
            self._distrust(slot)

    def _distrust(self, slot: int) -> None:
        """The channel is closed or garbled: hear no more of this worker, and have it killed in case it lives on."""
        worker = self._workers[slot]
        with contextlib.suppress(KeyError):
            self._selector.unregister(worker.channel)
        self._sandbox.kill(worker.worker_id)

    def _hear(self, slot: int, message: Loaded | Refused | Calling | Skipped | Result) -> None:
        worker = self._workers[slot]
        match message:
            case Loaded():
                worker.names = message.names
                worker.calling = message.names[0]
                self._queue.open(slot)
            case Refused():
                raise ConfigError(message.error)
            case Calling():
                worker.calling = message.name
            case Skipped():
                self._queue.answered(slot, message.ticket_id, time.monotonic(), duration_s=None)
            case Result():
                worker.calling = worker.names[0]
                self._note(slot, message.started_at, message.duration_s)
                ticket = self._queue.answered(slot, message.ticket_id, time.monotonic(), duration_s=message.duration_s)
                if ticket is not None:
                    self._answer(
                        ticket,
                        outcome=message.outcome,
                        error=message.error,
                        duration_s=message.duration_s,
                        reward=message.reward,
                        components=message.components,
                    )

    def _note(self, slot: int, started_at: float, duration_s: float) -> None:
        self.busy_s += duration_s
        self._journal.span(f"{self._name}/slot-{slot}", "score", start=started_at, end=started_at + duration_s)

    def _answer(
        self,
        ticket: Ticket,
        *,
        outcome: Outcome,
        error: str,
        duration_s: float,
        reward: float | None = None,
        components: dict[str, float] | None = None,
    ) -> None:
        self._answers.append(
            Scored(
                rollout_id=ticket.score.rollout_id,
                attempt=ticket.score.attempt,
                outcome=outcome,
                reward=reward,
                components=components or {},
                error=error,
                duration_s=duration_s,
            )
        )


def _call(ticket: Ticket) -> Call:
    score = ticket.score
    return Call(
        ticket_id=ticket.ticket_id,
        prompt=score.prompt.text,
        token_ids=score.token_ids,
        finish=score.finish,
        columns=score.prompt.columns,
    )
