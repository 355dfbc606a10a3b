"""The serving trainer's one connection, in a thread of its own: requests come in while one is computed, and signs of life go out."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from pipelinerl.errors import PeerGone, PeerSilent
from pipelinerl.messages import Alive, Failed, LayoutFixed, Message, ServingTrainerReady, Stop, WeightBufferReleased
from pipelinerl.transport.base import Link
from trainer.weights.publisher import Publisher

ALIVE_EVERY_S = 2.0
"""Between two signs of life. Must stay well below `trainer.silent_after_s`."""
CLOSE_S = 5.0
"""Seconds that a closing connection may take to hand over its last messages."""


class Connection:
    """A context; an error that leaves it reaches the server as `Failed`. Layout and buffers go to the publisher."""

    def __init__(self, connect: Callable[[], Link], *, ready: Callable[[], ServingTrainerReady], publisher: Publisher) -> None:
        """`connect` is called in the connection's thread, which owns the link; `ready` makes the introduction to a server."""
        self.busy_with = "starting"
        """The present work; told to the server."""
        self._connect = connect
        self._ready = ready
        self._publisher = publisher
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._requests: queue.SimpleQueue[tuple[int, Message | Exception]] = queue.SimpleQueue()
        """Each with the number of the server that sent it."""
        self._server = 0
        """The number of the present server: what the one before had asked for is not carried out, or not answered."""
        self._held: tuple[int, Message | Exception] | None = None
        """The first request of another server, while the models of the one before are being forgotten."""
        self._asked_by = 0
        """The server that the request under way is of."""
        self._is_closing = threading.Event()
        self._link: Link | None = None
        self._thread = threading.Thread(target=self._serve, name="connection", daemon=True)

    def __enter__(self) -> Connection:
        self._thread.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, PeerSilent | PeerGone):
            self._outbox.put(Failed(error=f"{type(error).__name__}: {error}"))
        self._is_closing.set()
        self._wake()
        self._thread.join(CLOSE_S)

    def take(self) -> Message | None:
        """Wait for the next request, or `Stop`; None where another server has taken the place of the one before, whose models nobody knows
        any more. Raises what ended the connection."""
        while True:
            server, taken = self._held or self._requests.get()
            self._held = None
            if isinstance(taken, Exception):
                raise taken
            before, self._asked_by = self._asked_by, server
            if 0 < before < server:
                self._held = server, taken
                return None
            if server == self._server:
                return taken

    def answer(self, message: Message) -> None:
        """Hand an answer to the server, if it is the one that has asked; never waits."""
        if self._asked_by == self._server:
            self._outbox.put(message)
            self._wake()

    def _wake(self) -> None:
        if self._link is not None:
            self._link.wake()

    def _serve(self) -> None:
        try:
            link = self._link = self._connect()
        except Exception as error:  # the thread's boundary: `take` raises it
            self._requests.put((self._server, error))
            return
        try:
            link.introduce(self._introduce)
            self._listen(link)
        except Exception as error:  # as above
            self._requests.put((self._server, error))
        self._is_closing.wait()
        self._send_all(link)
        link.close()

    def _introduce(self, kept: Sequence[bytes]) -> list[Message]:
        """Begin with a server. What another before it was told is of no use to this one."""
        self._server += 1
        while not self._outbox.empty():
            self._outbox.get()
        return [self._ready()]

    def _listen(self, link: Link) -> None:
        next_sign = time.monotonic()
        while not self._is_closing.is_set():
            self._send_all(link)
            if time.monotonic() >= next_sign:
                next_sign = time.monotonic() + ALIVE_EVERY_S
                link.send(Alive(busy_with=self.busy_with))
            match link.receive(max(0.0, next_sign - time.monotonic())):
                case None:
                    pass
                case LayoutFixed() as layout:
                    self._publisher.fix_layout(
                        layout.tensors, num_engines=layout.num_engines, transport=layout.transport, rollback_epoch=layout.rollback_epoch
                    )
                case WeightBufferReleased() as released:
                    self._publisher.release(released.buffer)
                case Stop() as stop:
                    self._publisher.give_up()
                    self._requests.put((self._server, stop))
                    return
                case request:
                    self._requests.put((self._server, request))

    def _send_all(self, link: Link) -> None:
        while not self._outbox.empty():
            link.send(self._outbox.get())
