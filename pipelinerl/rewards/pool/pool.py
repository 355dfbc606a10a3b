"""The slots of one pool. Each has a worker process, which gets calls by the rule in `queue`, is killed at a deadline, and is replaced."""

from __future__ import annotations

import contextlib
import dataclasses
import selectors
import socket
import time

from pipelinerl.errors import ConfigError, PeerSilent, WireError
from pipelinerl.messages import FunctionKind, Message, Outcome, Request
from pipelinerl.observe.journal import Journal
from pipelinerl.rewards.aggregator import PartialResult
from pipelinerl.rewards.calls import Call, Calling, CallResult, Ended, FromWorker, Loaded, Refused, Skipped, Withdraw
from pipelinerl.rewards.failures import Failures
from pipelinerl.rewards.pool.limits import BreakerState
from pipelinerl.rewards.pool.queue import Queue, Ticket
from pipelinerl.rewards.pool.sandbox import Sandbox
from pipelinerl.rewards.pool.stats import FunctionStats
from pipelinerl.runtime.function_errors import FunctionError, error_in
from pipelinerl.transport.codec import Decoder
from pipelinerl.transport.stream import Frames, frame

LOAD_DEADLINE_S = 300.0
"""Maximum wait for a worker to import the reward functions. A shorter one fails functions that load a model; a longer one hides a hung
import."""
_decoder: Decoder[Loaded | Refused | Calling | Skipped | CallResult] = Decoder(FromWorker)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Worker:
    """The scorer's view of one worker process."""

    worker_id: int
    channel: socket.socket
    frames: Frames
    born_at: float
    """Monotonic seconds."""
    names: tuple[str, ...] = ()
    """Names of its reward functions; empty until it has loaded them."""
    places: tuple[str, ...] = ()
    """`file:line` at which each function begins."""
    calling: str = ""
    """The function it runs, or will run next."""
    outgoing: bytearray = dataclasses.field(default_factory=bytearray)
    """Bytes that the channel has not taken yet."""
    waits_for_room: bool = False
    """True while the selector watches for room in the channel."""

    @property
    def place(self) -> str:
        """The `file:line` at which the function that it runs begins."""
        return dict(zip(self.names, self.places, strict=False)).get(self.calling, "")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    """A call that gave no result."""

    function: str
    place: str
    rollout_id: str


class Pool:
    """Takes requests and gives answers, in one thread, driven by the selector of `pools` and by `advance`."""

    def __init__(
        self,
        queue: Queue,
        *,
        number: int,
        num_slots: int,
        sandbox: Sandbox,
        selector: selectors.BaseSelector,
        stats: FunctionStats,
        failures: Failures,
        kind: FunctionKind,
        journal: Journal,
        name: str,
    ) -> None:
        self.busy_s = 0.0
        """Seconds of finished calls, including those that were killed."""
        self._journal = journal
        self._name = name
        self._queue = queue
        self._number = number
        self._answers: list[tuple[int, PartialResult]] = []
        self._selector = selector
        self._sandbox = sandbox
        self._stats = stats
        self._failures = failures
        self._kind = kind
        self._hung: dict[int, _Failed] = {}
        """Calls past their deadlines whose workers were asked for their stacks, by worker id."""
        self._workers: list[_Worker] = []
        self._num_slots = num_slots

    @property
    def num_running(self) -> int:
        return self._queue.num_running

    def total_busy_s(self) -> float:
        """Return the seconds of calls since the start, summed over slots, including calls under way."""
        now = time.monotonic()
        return self.busy_s + sum(self._queue.running_s(slot, now) for slot in range(self._num_slots))

    @property
    def breaker(self) -> BreakerState:
        return self._queue.limiter.breaker

    def start(self) -> None:
        """Start every worker; they load the reward functions on their own."""
        self._workers += [self._spawn(slot) for slot in range(self._num_slots)]

    @property
    def is_ready(self) -> bool:
        """True once every worker has loaded the reward functions."""
        return all(worker.names for worker in self._workers)

    def submit(self, request: Request) -> None:
        """Queue a request; it is handed to a worker by the next `advance`."""
        self._queue.add(request)

    def cancel(self, request_id: int) -> None:
        """Withdraw a request, so that no answer follows. A call under way runs on, and its answer is dropped."""
        self._withdraw(self._queue.cancel(request_id))

    def wake_at(self) -> float:
        """Return the time, in monotonic seconds, at which `advance` must be called next even if no worker has sent anything."""
        wake_at = [worker.born_at + LOAD_DEADLINE_S for worker in self._workers if not worker.names]
        if (deadline := self._queue.wake_at()) is not None:
            wake_at.append(deadline)
        return min(wake_at, default=float("inf"))

    def hear(self, slot: int, events: int) -> None:
        """Read from a worker's channel, or write to it, as `events` say."""
        if events & selectors.EVENT_READ:
            self._read(slot)
        if events & selectors.EVENT_WRITE:
            self._flush(slot)

    def bury(self, ended: list[Ended]) -> None:
        """Replace the workers of this pool that ended, and fail the calls that they were running."""
        for end in ended:
            if (hung := self._hung.pop(end.worker_id, None)) is not None:
                cause = f"no answer within {self._queue.deadline_s:g} s, its deadline; its process was killed"
                self._blame(hung, error_in(end.stack, cause=cause, place=hung.place), Outcome.TIMEOUT)
            for slot, worker in enumerate(self._workers):
                if worker.worker_id == end.worker_id:
                    self._bury(slot, end)

    def advance(self) -> list[tuple[int, PartialResult]]:
        """Kill workers past a deadline, and hand out the calls that fit. Return the answers since the last call of this method."""
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
        """Close the workers' channels; the end of the fork server kills the workers. Requests without an answer are dropped."""
        for worker in self._workers:
            worker.channel.close()

    # --- workers ---

    def _spawn(self, slot: int) -> _Worker:
        worker_id, channel = self._sandbox.spawn(self._number)
        self._selector.register(channel, selectors.EVENT_READ, data=(self, slot))
        return _Worker(worker_id=worker_id, channel=channel, frames=Frames(channel), born_at=time.monotonic())

    def _replace(self, slot: int) -> None:
        worker = self._workers[slot]
        with contextlib.suppress(KeyError):
            self._selector.unregister(worker.channel)
        worker.channel.close()
        self._workers[slot] = self._spawn(slot)

    def _bury(self, slot: int, end: Ended) -> None:
        """Fail the call that the worker of this slot was running when it ended by itself. Its earlier answers were read by the same
        `wait`.
        """
        worker = self._workers[slot]
        if not worker.names:
            raise ConfigError(f"a worker of {self._name} {end.how} while it imported the reward functions; see the scorer's log")
        ran_s = self._queue.running_s(slot, time.monotonic())
        ticket = self._queue.lose(slot)
        if ticket is not None:
            blamed = _Failed(function=worker.calling, place=worker.place, rollout_id=ticket.request.task.rollout_id)
            self._blame(blamed, error_in(end.stack, cause=f"its process {end.how}", place=worker.place), Outcome.ERROR)
        self._charge(ticket, slot, Outcome.ERROR, f"{worker.calling}: its process {end.how}", ran_s)
        self._replace(slot)

    def _time_out(self, slot: int) -> None:
        worker = self._workers[slot]
        self._sandbox.kill(worker.worker_id, wants_stack=True)
        ran_s = self._queue.running_s(slot, time.monotonic())
        error = f"{worker.calling} did not return within {self._queue.deadline_s:g} s; its process was killed"
        ticket = self._queue.lose(slot)
        if ticket is not None:
            self._hung[worker.worker_id] = _Failed(function=worker.calling, place=worker.place, rollout_id=ticket.request.task.rollout_id)
        self._charge(ticket, slot, Outcome.TIMEOUT, error, ran_s)
        self._replace(slot)

    def _blame(self, call: _Failed, error: FunctionError, outcome: Outcome) -> None:
        self._failures.note(call.function, error, kind=self._kind, outcome=outcome, rollout_id=call.rollout_id)

    def _charge(self, ticket: Ticket | None, slot: int, outcome: Outcome, error: str, ran_s: float) -> None:
        calling = self._workers[slot].calling
        if ran_s:
            self._note(slot, time.time() - ran_s, ran_s)
        if ticket is not None:
            self._settle(ticket, PartialResult(outcome=outcome, error=error, duration_s=ran_s), {calling: ran_s}, failed=calling)

    # --- messages ---

    def _hand_out(self, now: float) -> None:
        for slot, tickets in self._queue.hand_out(now).items():
            self._send(slot, *(Call(call_id=ticket.call_id, task=ticket.request.task) for ticket in tickets))

    def _withdraw(self, tickets: dict[int, tuple[int, ...]]) -> None:
        for slot, call_ids in tickets.items():
            self._send(slot, Withdraw(call_ids=call_ids))

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
                self._selector.modify(worker.channel, events, data=(self, slot))

    def _read(self, slot: int) -> None:
        """Read the messages that a worker sent."""
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
        """Stop reading a channel that is closed or garbled, and have its worker killed in case it lives on."""
        worker = self._workers[slot]
        with contextlib.suppress(KeyError):
            self._selector.unregister(worker.channel)
        self._sandbox.kill(worker.worker_id)

    def _hear(self, slot: int, message: Loaded | Refused | Calling | Skipped | CallResult) -> None:
        worker = self._workers[slot]
        match message:
            case Loaded():
                worker.names, worker.places = message.names, message.places
                worker.calling = message.names[0]
                self._queue.open(slot)
            case Refused():
                raise ConfigError(message.error)
            case Calling():
                worker.calling = message.name
            case Skipped():
                self._queue.answered(slot, message.call_id, time.monotonic(), duration_s=None)
            case CallResult():
                worker.calling = worker.names[0]
                self._note(slot, message.started_at, message.duration_s)
                ticket = self._queue.answered(slot, message.call_id, time.monotonic(), duration_s=message.duration_s)
                if ticket is not None:
                    if message.failure is not None:
                        blamed = _Failed(function=message.failed, place="", rollout_id=ticket.request.task.rollout_id)
                        self._blame(blamed, message.failure, message.outcome)
                    part = PartialResult(
                        outcome=message.outcome,
                        components=message.components,
                        error=message.error,
                        duration_s=message.duration_s,
                        observation=message.observation,
                    )
                    self._settle(ticket, part, message.durations_s, failed=message.failed)

    def _note(self, slot: int, started_at: float, duration_s: float) -> None:
        self.busy_s += duration_s
        self._journal.span(f"{self._name}/slot-{slot}", "score", start=started_at, end=started_at + duration_s)

    def _settle(self, ticket: Ticket, part: PartialResult, durations_s: dict[str, float], *, failed: str) -> None:
        """Count a try that is over, then answer the request, or try again."""
        now = time.monotonic()
        self._stats.note(durations_s, rollout_id=ticket.request.task.rollout_id, failed=failed, outcome=part.outcome)
        is_failure = part.outcome in (Outcome.ERROR, Outcome.TIMEOUT)
        self._queue.limiter.ended(now, is_failure=is_failure)
        if is_failure and self._queue.try_again(ticket, now):
            self._stats.retried(failed)
        else:
            self._answers.append((ticket.request.request_id, part))
