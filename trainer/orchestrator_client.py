"""The trainer's one connection to the orchestrator, in a thread of its own: rows arrive while the last one is being computed.

The thread pulls ahead: it keeps `PULLS_AHEAD` rows asked for or waiting to be taken, over the seam between two steps as well. So the memory
for rows is bounded, and the training loop waits only when the orchestrator has no row yet. While the loop computes, the thread says that
this process is alive and what it is doing.
"""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from pipelinerl.errors import PeerGone, PeerRefused, PeerSilent
from pipelinerl.messages import (
    Alive,
    CheckpointFailed,
    CheckpointSaved,
    Command,
    ComputeLogprobs,
    EndTraining,
    Failed,
    LayoutFixed,
    LogprobsComputed,
    Message,
    MicroBatch,
    PolicyHeld,
    PolicyPublished,
    SaveCheckpoint,
    StepClosed,
    StepDone,
    Stop,
    TakeMicroBatch,
    TrainerReady,
    TrainingEnded,
    WeightBufferReleased,
)
from pipelinerl.transport.base import Link
from trainer.session import TrainerSession
from trainer.weights.publisher import Publisher

PULLS_AHEAD = 2
"""Rows asked for or not yet taken. 1 would leave the trainer idle for a round trip after every row; more holds rows back from nothing."""
ALIVE_EVERY_S = 2.0
"""Between two signs of life. Must stay well below `trainer.silent_after_s`."""
CLOSE_S = 5.0
"""Seconds that a closing client may take to hand its last messages to the connection."""


class Pulls:
    """Decides which rows to ask for next, and when a step is whole. No clock, no socket."""

    def __init__(self, *, replica: int, first_step: int, num_steps: int) -> None:
        self._replica = replica
        self._num_steps = num_steps
        self._step = first_step
        self._next_index = 0
        self._asked: set[int] = set()
        """Indices of this step asked for and not answered."""
        self._num_received = 0
        self._seal: StepClosed | None = None

    @property
    def num_asked(self) -> int:
        return len(self._asked)

    def __str__(self) -> str:
        return f"row {min(self._asked, default=self._next_index)} of step {self._step}"

    def wanted(self, num_more: int) -> Iterator[TakeMicroBatch]:
        """The next `num_more` pulls, as far as there is anything left to ask for."""
        for _ in range(num_more):
            if self._step >= self._num_steps:
                return
            self._asked.add(self._next_index)
            yield TakeMicroBatch(replica=self._replica, step=self._step, index=self._next_index)
            self._next_index += 1

    def unanswered(self) -> Iterator[TakeMicroBatch]:
        """The pulls without an answer, again."""
        for index in sorted(self._asked):
            yield TakeMicroBatch(replica=self._replica, step=self._step, index=index)

    def take(self, message: MicroBatch | StepClosed) -> list[MicroBatch | StepClosed]:
        """Return what the training loop may have now; the seal follows the last row of its step. A repeated answer gives nothing.

        Raises `PeerRefused` for a row or a seal of a step that was not asked for.
        """
        if message.step < self._step:
            return []
        if message.step > self._step:
            raise PeerRefused(f"the orchestrator sent {type(message).__name__} of step {message.step}, asked for was {self}")
        given: list[MicroBatch | StepClosed] = []
        if isinstance(message, StepClosed):
            self._seal = message
            self._asked = {index for index in self._asked if index < message.num_micro_batches}
        elif message.index in self._asked:
            self._asked.remove(message.index)
            self._num_received += 1
            given.append(message)
        if self._seal is not None and self._num_received == self._seal.num_micro_batches:
            given.append(self._seal)
            self._step, self._next_index, self._num_received, self._seal = self._step + 1, 0, 0, None
        return given


class OrchestratorClient:
    """The training loop's view of the orchestrator, a context: an error that leaves it reaches the orchestrator as `Failed`."""

    def __init__(
        self,
        connect: Callable[[], Link],
        *,
        ready: TrainerReady,
        num_steps: int,
        silent_after_s: float,
        publisher: Publisher | None = None,
    ) -> None:
        """`connect` is called in the client's thread, which owns the link. Layout and buffers go to `publisher`, where there is one."""
        self.busy_with = "starting"
        """The training loop's present work; told to the orchestrator."""
        self._connect = connect
        self._session = TrainerSession(ready)
        self._silent_after_s = silent_after_s
        self._publisher = publisher
        self._pulls = Pulls(replica=ready.replica, first_step=ready.version, num_steps=num_steps)
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._changed = threading.Condition()
        """Guards `_rows` and `_end`."""
        self._rows: collections.deque[MicroBatch | StepClosed | Command] = collections.deque()
        self._end: Stop | Exception | None = None
        """Why nothing more will come."""
        self._end_of_training: EndTraining | None = None
        """No row is wanted any more; what the trainer says still is."""
        self._knows_layout = False
        """False: a buffer that is handed back belongs to the trainer before this one."""
        self._is_closing = threading.Event()
        self._link: Link | None = None
        """None until connected."""
        self._thread = threading.Thread(target=self._serve, name="client", daemon=True)

    def __enter__(self) -> OrchestratorClient:
        self._thread.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # A peer that is lost is no fault of this process, which will be started again: its words would end the whole run.
        if isinstance(error, Exception) and not isinstance(error, PeerSilent | PeerGone):
            self._outbox.put(Failed(error=f"{type(error).__name__}: {error}"))
        self._is_closing.set()
        self._wake()
        self._thread.join(CLOSE_S)

    def take(self) -> MicroBatch | StepClosed | Command | Stop:
        """Wait for the next row, the seal after a step's last row, or a command between two steps. Once told to stop, or to train no
        further, give `Stop` at once.

        Raises `PeerSilent` where the orchestrator gives no sign of life for too long, `WireError` and `PeerRefused` for what it should not
        send, `WeightsError` for a layout that does not fit.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._end or self._end_of_training)  # the client's thread sees to the deadline
            if isinstance(self._end, Exception):
                raise self._end
            if self._end_of_training is not None:
                return Stop(reason=self._end_of_training.reason)
            taken = self._end or self._rows.popleft()
        self._wake()  # there is room to pull another row
        return taken

    def wait_for_stop(self, deadline_s: float) -> bool:
        """Wait until told to stop; False where that did not happen in time. Raises as `take` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._end, deadline_s)
        if isinstance(self._end, Exception):
            raise self._end
        return self._end is not None

    def wake(self) -> None:
        """Have a present or later `take` give `Stop`: nobody wants rows any more."""
        with self._changed:
            self._end = self._end or Stop(reason="the training loop has ended")
            self._changed.notify_all()

    def send(
        self, message: StepDone | PolicyPublished | LogprobsComputed | CheckpointSaved | CheckpointFailed | TrainingEnded | Failed
    ) -> None:
        """Hand a message to the orchestrator; never waits."""
        self._outbox.put(message)
        self._wake()

    def _wake(self) -> None:
        """Have the client's thread look at what the loop has done."""
        if self._link is not None:
            self._link.wake()

    def _serve(self) -> None:
        try:
            link = self._link = self._connect()
        except Exception as error:  # the thread's boundary: the training loop raises it
            self._end_with(error)
            return
        try:
            link.introduce(self._introduce)
            self._listen(link)
        except Exception as error:  # as above
            self._end_with(error)
        self._is_closing.wait()
        self._send_all(link)
        link.close()

    def _introduce(self, kept: Sequence[bytes]) -> Iterator[Message]:
        """Introduce this trainer to the first orchestrator, and to a restarted one, with whatever the one before was told."""
        yield from self._session.introduction()
        yield from self._pulls.unanswered()

    def _listen(self, link: Link) -> None:
        """Send, pull and hand over until told to stop or closed."""
        next_sign = quiet_since = time.monotonic()
        while not self._is_closing.is_set() and self._end is None:
            self._send_all(link)
            if time.monotonic() >= next_sign:
                next_sign = time.monotonic() + ALIVE_EVERY_S
                link.send(Alive(busy_with=self.busy_with))
            if self._end_of_training is None:
                for pull in self._pulls.wanted(PULLS_AHEAD - self._pulls.num_asked - len(self._rows)):
                    link.send(pull)
            message = link.receive(min(next_sign - time.monotonic(), self._silent_after_s))
            if message is not None:
                self._handle(message, link)
            if message is not None or self._rows or not self._pulls.num_asked:
                quiet_since = time.monotonic()
            elif min(link.silent_s, time.monotonic() - quiet_since) > self._silent_after_s:
                raise PeerSilent(
                    f"waited {self._silent_after_s:g} s for the orchestrator to send {self._pulls}, and its process gave no sign of life:"
                    " it is gone, or stands still. See its log"
                )

    def _handle(self, message: Message, link: Link) -> None:
        self._session.record_received(message)
        match message:
            case MicroBatch() | StepClosed():
                given = self._pulls.take(message)
                with self._changed:
                    self._rows.extend(given)
                    self._changed.notify_all()
            case SaveCheckpoint() | ComputeLogprobs():  # it comes before any row of the step that follows
                with self._changed:
                    self._rows.append(message)
                    self._changed.notify_all()
            case LayoutFixed() if self._publisher is not None:
                self._publisher.fix_layout(
                    message.tensors,
                    num_engines=message.num_engines,
                    transport=message.transport,
                    rollback_epoch=message.rollback_epoch,
                    shards=message.shards,
                    num_apart=message.num_apart,
                )
                self._knows_layout = True
                for published in self._session.published():  # to another orchestrator: the one before has heard of them
                    link.send(published)
            case WeightBufferReleased() if self._publisher is not None and self._knows_layout:
                self._publisher.release(message.buffer)
            case PolicyHeld() if self._publisher is not None:
                self._publisher.held(message.version, rollback_epoch=message.rollback_epoch)
            case EndTraining():
                with self._changed:
                    self._end_of_training = message
                    self._changed.notify_all()
            case Stop():
                self._end_with(message)

    def _send_all(self, link: Link) -> None:
        while not self._outbox.empty():
            message = self._outbox.get()
            self._session.record_sent(message)
            link.send(message)

    def _end_with(self, end: Stop | Exception) -> None:
        with self._changed:
            self._end = end
            self._changed.notify_all()
        if self._publisher is not None:
            self._publisher.give_up()
