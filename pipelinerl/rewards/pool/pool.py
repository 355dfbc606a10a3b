"""The slots of one pool. Each has a worker process, which gets calls by the rule in `queue`, is killed at a deadline, and is replaced."""

from __future__ import annotations

import contextlib
import dataclasses
import selectors
import socket
import time
from collections.abc import Sequence

from pipelinerl.errors import ConfigError, PeerSilent, WireError
from pipelinerl.messages import FunctionKind, Message, Outcome, RequestKind
from pipelinerl.observe.journal import Journal
from pipelinerl.rewards.calls import Call, Calling, CallResult, Ended, FromWorker, Loaded, Refused, Skipped, Withdraw
from pipelinerl.rewards.failures import Failures
from pipelinerl.rewards.pool.episodes import EpisodeQueue
from pipelinerl.rewards.pool.plan import PoolSpec
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
    calling: str
    """The function it runs, or will run next."""
    places: dict[str, str] = dataclasses.field(default_factory=dict)
    """`file:line` at which each function begins, by name; empty until it has loaded them."""
    outgoing: bytearray = dataclasses.field(default_factory=bytearray)
    """Bytes that the channel has not taken yet."""
    waits_for_room: bool = False
    """True while the selector watches for room in the channel."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Pool:
    """Gives the answers to the requests in `queue`, in one thread, driven by the selector of `pools` and by `advance`."""

    spec: PoolSpec
    number: int
    """Position among the pools."""
    name: str
    sandbox: Sandbox
    selector: selectors.BaseSelector
    stats: FunctionStats
    failures: Failures
    journal: Journal
    gpus: Sequence[str] = ()
    """UUID of each slot's GPU; none where it was dealt none."""
    queue: Queue | EpisodeQueue = dataclasses.field(init=False)
    _busy_s: float = 0.0
    """Seconds of finished calls, including those that were killed."""
    _workers: list[_Worker] = dataclasses.field(default_factory=list)
    """One for each slot."""
    _hung: dict[int, tuple[_Worker, Ticket]] = dataclasses.field(default_factory=dict)
    """Calls past their deadlines whose workers were asked for their stacks, by worker id."""
    _answers: list[tuple[int, CallResult]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        spec = self.spec
        if spec.is_stateful:
            self.queue = EpisodeQueue(num_slots=spec.num_slots, deadline_s=spec.deadline_s)
            return
        self.queue = Queue(num_slots=spec.num_slots, deadline_s=spec.deadline_s, per_s=spec.per_s, retries=spec.retries, batch=spec.batch)

    def total_busy_s(self) -> float:
        """Return the seconds of calls since the start, summed over slots, including calls under way."""
        now = time.monotonic()
        return self._busy_s + sum(self.queue.running_s(slot, now) for slot in range(self.spec.num_slots))

    def start(self) -> None:
        """Start every worker; they load the reward functions on their own."""
        self._workers += [self._spawn(slot) for slot in range(self.spec.num_slots)]

    @property
    def is_ready(self) -> bool:
        """True once every worker has loaded the reward functions."""
        return all(worker.places for worker in self._workers)

    def cancel(self, request_id: int) -> None:
        """Withdraw a request, so that no answer follows. A call under way runs on, and its answer is dropped."""
        self._withdraw(self.queue.cancel(request_id))

    def wake_at(self) -> float:
        """Return the time, in monotonic seconds, at which `advance` must be called next even if no worker has sent anything."""
        wake_at = [worker.born_at + LOAD_DEADLINE_S for worker in self._workers if not worker.places]
        if (deadline := self.queue.wake_at()) is not None:
            wake_at.append(deadline)
        return min(wake_at, default=float("inf"))

    def on_event(self, slot: int, events: int) -> None:
        """Read from a worker's channel, or write to it, as `events` say."""
        if events & selectors.EVENT_READ:
            self._read(slot)
        if events & selectors.EVENT_WRITE:
            self._flush(slot)

    def replace_ended(self, ended: list[Ended]) -> None:
        """Replace the workers of this pool that ended, and fail the calls that they were running: their earlier answers were read by the
        same `wait`.
        """
        slots = {worker.worker_id: slot for slot, worker in enumerate(self._workers)}
        for end in ended:
            lost, outcome = self._hung.pop(end.worker_id, None), Outcome.TIMEOUT
            cause = f"no answer within {self.spec.deadline_s:g} s, its deadline; its process was killed"
            if end.worker_id in slots:
                worker = self._workers[slots[end.worker_id]]
                if not worker.places:
                    raise ConfigError(f"a worker of {self.name} {end.how} while it imported the reward functions; see the scorer's log")
                outcome, cause = Outcome.ERROR, f"its process {end.how}"
                ticket = self._lose(slots[end.worker_id], outcome, f"{worker.calling}: {cause}")
                lost = None if ticket is None else (worker, ticket)
            if lost is not None:
                worker, ticket = lost
                error = error_in(end.stack, cause=cause, place=worker.places.get(worker.calling, ""))
                self._report(worker.calling, ticket, error, outcome)

    def advance(self) -> list[tuple[int, CallResult]]:
        """Kill workers past a deadline, and hand out the calls that fit. Return the answers since the last call of this method."""
        now = time.monotonic()
        for slot in self.queue.overdue(now):
            worker = self._workers[slot]
            self.sandbox.kill(worker.worker_id, wants_stack=True)
            error = f"{worker.calling} did not return within {self.spec.deadline_s:g} s; its process was killed"
            if (ticket := self._lose(slot, Outcome.TIMEOUT, error)) is not None:
                self._hung[worker.worker_id] = worker, ticket
        for worker in self._workers:
            if not worker.places and now - worker.born_at >= LOAD_DEADLINE_S:
                raise PeerSilent(f"waited {LOAD_DEADLINE_S:g} s for a worker of {self.name} to import the reward functions")
        self._withdraw(self.queue.take_back(now))
        for slot, tickets in self.queue.hand_out(now).items():
            self._send(slot, *(Call(call_id=ticket.call_id, task=ticket.request.task, closes=ticket.closes) for ticket in tickets))
        if isinstance(self.queue, EpisodeQueue):
            self._answers += [(ticket.request.request_id, _lost(ticket)) for ticket in self.queue.take_lost()]
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """Close the workers' channels; the end of the fork server kills the workers. Requests without an answer are dropped."""
        for worker in self._workers:
            worker.channel.close()

    # --- workers ---

    def _spawn(self, slot: int) -> _Worker:
        worker_id, channel = self.sandbox.spawn(self.number, gpu=self.gpus[slot] if self.gpus else "")
        self.selector.register(channel, selectors.EVENT_READ, data=(self, slot))
        frames = Frames(channel)
        return _Worker(worker_id=worker_id, channel=channel, frames=frames, born_at=time.monotonic(), calling=self.spec.names[0])

    def _lose(self, slot: int, outcome: Outcome, error: str) -> Ticket | None:
        """Replace the worker of a slot, and fail the call that it was running. Return its ticket where somebody waits for the answer."""
        worker = self._workers[slot]
        ran_s = self.queue.running_s(slot, time.monotonic())
        started_at = time.time() - ran_s
        ticket = self.queue.lose(slot)
        if ran_s:
            self._note(slot, started_at, ran_s)
        if ticket is not None:
            result = CallResult(
                call_id=ticket.call_id,
                outcome=outcome,
                error=error,
                failed=worker.calling,
                started_at=started_at,
                duration_s=ran_s,
                durations_s={worker.calling: ran_s},
                is_lost=self.spec.is_stateful and outcome is Outcome.ERROR,
            )
            self._settle(ticket, result)
        self._stop_reading(worker)
        worker.channel.close()
        self._workers[slot] = self._spawn(slot)
        return ticket

    def _stop_reading(self, worker: _Worker) -> None:
        with contextlib.suppress(KeyError):
            self.selector.unregister(worker.channel)

    def _report(self, function: str, ticket: Ticket, error: FunctionError, outcome: Outcome) -> None:
        kind = FunctionKind.ENVIRONMENT if self.spec.takes is RequestKind.ENVIRONMENT else FunctionKind.REWARD
        self.failures.note(function, error, kind=kind, outcome=outcome, rollout_id=ticket.request.task.rollout_id)

    # --- messages ---

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
                self.selector.modify(worker.channel, events, data=(self, slot))

    def _read(self, slot: int) -> None:
        """Read the messages that a worker sent."""
        worker = self._workers[slot]
        try:
            bodies = worker.frames.receive()
            for body in bodies or ():
                self._on_message(slot, _decoder.decode(body))
        except (ConnectionResetError, WireError, ValueError):  # the last two: reward code wrote into the channel
            bodies = None
        if bodies is None:
            self._stop_and_kill(slot)

    def _stop_and_kill(self, slot: int) -> None:
        """Stop reading a channel that is closed or garbled, and have its worker killed in case it lives on."""
        worker = self._workers[slot]
        self._stop_reading(worker)
        self.sandbox.kill(worker.worker_id)

    def _on_message(self, slot: int, message: Loaded | Refused | Calling | Skipped | CallResult) -> None:
        worker = self._workers[slot]
        match message:
            case Loaded():
                worker.places = message.places
                self.queue.open(slot)
            case Refused():
                raise ConfigError(message.error)
            case Calling():
                worker.calling = message.name
            case Skipped():
                self.queue.answered(slot, message.call_id, time.monotonic(), duration_s=None)
            case CallResult():
                worker.calling = self.spec.names[0]
                self._note(slot, message.started_at, message.duration_s)
                ticket = self.queue.answered(slot, message.call_id, time.monotonic(), duration_s=message.duration_s)
                if ticket is not None:
                    if message.failure is not None:
                        self._report(message.failed, ticket, message.failure, message.outcome)
                    self._settle(ticket, message)

    def _note(self, slot: int, started_at: float, duration_s: float) -> None:
        self._busy_s += duration_s
        self.journal.span(f"{self.name}/slot-{slot}", "score", start=started_at, end=started_at + duration_s)

    def _settle(self, ticket: Ticket, result: CallResult) -> None:
        """Count a try that is over, then answer the request, or try again."""
        if ticket.closes:
            return
        self.stats.note(result.durations_s, rollout_id=ticket.request.task.rollout_id, failed=result.failed, outcome=result.outcome)
        is_failure = result.outcome in (Outcome.ERROR, Outcome.TIMEOUT)
        if self.queue.ended(ticket, time.monotonic(), is_failure=is_failure):
            self.stats.retried(result.failed)
        else:
            self._answers.append((ticket.request.request_id, result))


def _lost(ticket: Ticket) -> CallResult:
    """Return the answer to a task of an episode that no process holds any more."""
    error = f"the process that held the environment of {ticket.request.task.rollout_id} is gone"
    return CallResult(
        call_id=ticket.call_id, outcome=Outcome.ERROR, error=error, is_lost=True, started_at=time.time(), duration_s=0.0, durations_s={}
    )
