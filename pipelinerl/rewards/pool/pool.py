"""The slots of one pool. Each has a worker process, which gets calls by the rule in `queue`, is killed at a deadline, and is replaced."""

from __future__ import annotations

import contextlib
import dataclasses
import selectors
import socket
import time

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
    gpu: str
    """UUID of its GPU; empty where it was dealt none."""
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
    given_up: dict[int, str] = dataclasses.field(default_factory=dict)
    """Slots of a reward model that were to join and have no worker, as it could not load the model, with the reason."""
    queue: Queue | EpisodeQueue = dataclasses.field(init=False)
    _busy_s: float = 0.0
    """Seconds of finished calls, including those that were killed."""
    _workers: dict[int, _Worker] = dataclasses.field(default_factory=dict)
    """One for each slot that is there."""
    _spares: set[int] = dataclasses.field(default_factory=set)
    """Slots of a reward model that have joined: it goes on without one that cannot load it."""
    _closed: set[int] = dataclasses.field(default_factory=set)
    """Slots of a reward model that are to leave."""
    _hung: dict[int, tuple[_Worker, Ticket]] = dataclasses.field(default_factory=dict)
    """Calls past their deadlines whose workers were asked for their stacks, by worker id."""
    _answers: list[tuple[int, CallResult]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        spec = self.spec
        if spec.is_stateful:
            self.queue = EpisodeQueue(num_slots=spec.num_slots, deadline_s=spec.deadline_s)
            return
        num_slots = spec.most_slots or spec.num_slots
        self.queue = Queue(num_slots=num_slots, deadline_s=spec.deadline_s, per_s=spec.per_s, retries=spec.retries, batch=spec.batch)

    def total_busy_s(self) -> float:
        """Return the seconds of calls since the start, summed over slots, including calls under way."""
        now = time.monotonic()
        return self._busy_s + sum(self.queue.running_s(slot, now) for slot in self._workers)

    def start(self) -> None:
        """Start every worker; they load the reward functions on their own."""
        for slot in range(self.spec.num_slots):
            self.start_slot(slot, gpu="", is_spare=False)

    # --- slots of a reward model, which join and leave ---

    @property
    def slots(self) -> list[int]:
        """The slots that have a worker."""
        return list(self._workers)

    def is_loaded(self, slot: int) -> bool:
        """Return whether the slot's worker has loaded its functions, or its model."""
        return bool(self._workers[slot].places)

    def start_slot(self, slot: int, *, gpu: str, is_spare: bool) -> None:
        """Start the worker of a slot that has none; it takes calls once it has loaded. The pool does without a spare that cannot."""
        self.given_up.pop(slot, None)
        (self._spares.add if is_spare else self._spares.discard)(slot)
        self._workers[slot] = self._spawn(slot, gpu=gpu)

    def close_slot(self, slot: int, *, is_closed: bool) -> None:
        """Give a slot no more calls, as it is to leave, or some again, as it stays."""
        assert isinstance(self.queue, Queue), "reward models have no episodes"
        (self._closed.add if is_closed else self._closed.discard)(slot)
        if is_closed:
            self.queue.close(slot)
        elif self.is_loaded(slot):
            self.queue.open(slot)

    def end_slot(self, slot: int) -> None:
        """End the worker of a slot; the calls that it has wait again, for others."""
        assert isinstance(self.queue, Queue), "reward models have no episodes"
        worker = self._workers.pop(slot)
        if ran_s := self.queue.running_s(slot, time.monotonic()):
            self._note(slot, time.time() - ran_s, ran_s)
        self.queue.release(slot)
        self._closed.discard(slot)
        self._stop_reading(worker)
        worker.channel.close()
        self.sandbox.kill(worker.worker_id)

    @property
    def is_ready(self) -> bool:
        """True once every worker has loaded the reward functions; of a reward model, all that it began with, and one at least."""
        awaited = [worker for slot, worker in self._workers.items() if slot not in self._spares]
        return all(worker.places for worker in awaited) if awaited else any(worker.places for worker in self._workers.values())

    def cancel(self, request_id: int) -> None:
        """Withdraw a request, so that no answer follows. A call under way runs on, and its answer is dropped."""
        self._withdraw(self.queue.cancel(request_id))

    def wake_at(self) -> float:
        """Return the time, in monotonic seconds, at which `advance` must be called next even if no worker has sent anything."""
        wake_at = [worker.born_at + LOAD_DEADLINE_S for worker in self._workers.values() if not worker.places]
        if (deadline := self.queue.wake_at()) is not None:
            wake_at.append(deadline)
        return min(wake_at, default=float("inf"))

    def on_event(self, slot: int, events: int) -> None:
        """Read from a worker's channel, or write to it, as `events` say."""
        if events & selectors.EVENT_READ:
            self._read(slot)
        if events & selectors.EVENT_WRITE and slot in self._workers:
            self._flush(slot)

    def replace_ended(self, ended: list[Ended]) -> None:
        """Replace the workers of this pool that ended, and fail the calls that they were running: their earlier answers were read by the
        same `wait`.
        """
        slots = {worker.worker_id: slot for slot, worker in self._workers.items()}
        for end in ended:
            lost, outcome = self._hung.pop(end.worker_id, None), Outcome.TIMEOUT
            cause = f"no answer within {self.spec.deadline_s:g} s, its deadline; its process was killed"
            if end.worker_id in slots:
                worker = self._workers[slots[end.worker_id]]
                if not worker.places:
                    what = "loaded the model" if self.spec.model else "imported the reward functions"
                    self._cannot_load(
                        slots[end.worker_id],
                        ConfigError(f"a worker of {self.name} {end.how} while it {what}; see the scorer's log"),
                    )
                    continue
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
        for slot, worker in list(self._workers.items()):
            if not worker.places and now - worker.born_at >= LOAD_DEADLINE_S:
                what = "load the model" if self.spec.model else "import the reward functions"
                self._cannot_load(slot, PeerSilent(f"waited {LOAD_DEADLINE_S:g} s for a worker of {self.name} to {what}"))
        self._withdraw(self.queue.take_back(now))
        for slot, tickets in self.queue.hand_out(now).items():
            self._send(slot, *(Call(call_id=ticket.call_id, task=ticket.request.task, closes=ticket.closes) for ticket in tickets))
        if isinstance(self.queue, EpisodeQueue):
            self._answers += [(ticket.request.request_id, _lost(ticket)) for ticket in self.queue.take_lost()]
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """Close the workers' channels; the end of the fork server kills the workers. Requests without an answer are dropped."""
        for worker in self._workers.values():
            worker.channel.close()

    # --- workers ---

    def _spawn(self, slot: int, *, gpu: str) -> _Worker:
        worker_id, channel = self.sandbox.spawn(self.number, gpu=gpu)
        self.selector.register(channel, selectors.EVENT_READ, data=(self, slot))
        frames = Frames(channel)
        calling = self.spec.names[0]
        return _Worker(worker_id=worker_id, channel=channel, frames=frames, born_at=time.monotonic(), calling=calling, gpu=gpu)

    def _cannot_load(self, slot: int, error: ConfigError | PeerSilent) -> None:
        """Go on without a spare that cannot load its model, as long as there is another worker. Raises the error else."""
        if slot not in self._spares or len(self._workers) == 1:
            raise error
        self.end_slot(slot)
        self.given_up[slot] = str(error)

    def _lose(self, slot: int, outcome: Outcome, error: str) -> Ticket | None:
        """Replace the worker of a slot, unless it leaves, and fail the call that it ran. Return its ticket where somebody waits for it."""
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
        del self._workers[slot]
        if slot in self._closed:
            self._closed.discard(slot)
        else:
            self._workers[slot] = self._spawn(slot, gpu=worker.gpu)
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
            self._stop_and_kill(worker)

    def _stop_and_kill(self, worker: _Worker) -> None:
        """Stop reading a channel that is closed or garbled, and have its worker killed in case it lives on."""
        self._stop_reading(worker)
        self.sandbox.kill(worker.worker_id)

    def _on_message(self, slot: int, message: Loaded | Refused | Calling | Skipped | CallResult) -> None:
        worker = self._workers[slot]
        match message:
            case Loaded():
                worker.places = message.places
                if slot not in self._closed:
                    self.queue.open(slot)
            case Refused():
                self._cannot_load(slot, ConfigError(message.error))
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
