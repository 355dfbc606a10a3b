"""ZeroMQ over TCP: a ROUTER in the orchestrator, a DEALER in each peer, CURVE on both.

The hub binds first, to a port the system picks, and then publishes it in `<run>/endpoints/<role>.json`; no port is fixed, none can be
taken in between. ZeroMQ would drop silently at its own high-water marks, so sending has none: a `Session` bounds what is on its way.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from pipelinerl.errors import ConfigError, PeerSilent
from pipelinerl.messages import Message
from pipelinerl.runtime.process import register
from pipelinerl.runtime.stage import Signal
from pipelinerl.transport.base import Introduction
from pipelinerl.transport.codec import MAX_MESSAGE_BYTES, Decoder, encode
from pipelinerl.transport.curve import authenticator, bind, configure
from pipelinerl.transport.endpoint import Endpoint, publish_endpoint, read_endpoint
from pipelinerl.transport.frame import OVERHEAD_BYTES
from pipelinerl.transport.keys import KeyPair, read_allow_list, read_keys
from pipelinerl.transport.rejected import RejectedConnections
from pipelinerl.transport.router import Router
from pipelinerl.transport.session import PROBE_EVERY_S, Session

_NOBLOCK, _NOBLOCK_MORE, _EVENTS, _POLLIN = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.EVENTS), int(zmq.POLLIN)
_SRCFD = int(zmq.SRCFD)
"""Flags as plain numbers: combining members of an enumeration costs more than sending a small frame."""
LINGER_MS = 1000
"""Longest time that a closing socket tries to deliver what was sent. Longer delays the end of a run whose peer is dead."""
COPY_BELOW_BYTES = 1 << 16
"""Smaller frames are cheaper copied than shared with ZeroMQ's thread."""
FREE_BYTES = 64 << 20
"""Twice what may be on its way to one peer."""
_M_TRIM_THRESHOLD = -1
MAX_UNREAD = 1000
"""Frames ZeroMQ holds that the hub has not read, for each peer; then it reads no more from that connection, and nothing is lost. Only a
peer that ignores its credit gets there: what it sends on stays with it.
"""
SILENT_S = 2.0
"""An orchestrator that gave no sign for so long may have been replaced: its address is looked up again. It answers reminders, so a living
one is never quiet for longer than two of them, unless it is very busy, and then looking costs the reading of a small file.
"""
RENEW_AFTER = 2
"""Looks in a row, a reminder apart, after which an orchestrator that owes a sign and is silent is connected to anew: after bytes that it
cannot decrypt, ZeroMQ gives a connection up for good. Fewer breaks connections to one that is merely busy; what was sent comes again.
"""
MAX_FORMER = 1000
"""Connections remembered that were replaced, of all peers, so that what they still have on its way brings them not back. Each peer
replaces one when its connection breaks.
"""
MAX_BATCH = 256
"""Frames taken at once; then the stages have their turn. Smaller costs more turns; larger lets a flood hold them up."""


class ZmqHub:
    """A bound ROUTER for one kind of peer; see `transport.base.Hub`.

    ZeroMQ's descriptor only says that something changed since the socket was last touched, and sending touches it too: a message that
    arrives during a send raises no further signal. So both the descriptor and every send look whether there is something to read.
    """

    def __init__(self, run_folder: Path, role: str, *, accepts: Any, interface: str = "127.0.0.1") -> None:
        self._router = Router(accepts=accepts, carry=self._carry, clock=time.monotonic)
        self._routes: dict[str, bytes] = {}
        """The newest connection of each peer, by its name."""
        self._former: collections.deque[bytes] = collections.deque(maxlen=MAX_FORMER)
        """Connections before those."""
        self._role = role
        self._context = zmq.Context()
        self.allow_list = read_allow_list(run_folder, role)
        self._authenticator = authenticator(self._context, self.allow_list)
        keys = read_keys(run_folder, "orchestrator")
        self._readable = Signal()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop that watches the descriptor, from the first `receive` on."""
        self._is_looking = False
        """A look is due, because something was sent."""
        self._probe_timer: asyncio.TimerHandle | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        _configure(self._socket, keys)
        self._socket.rcvhwm = MAX_UNREAD
        self._socket.router_mandatory = True
        self._rejected = RejectedConnections(self._socket, refused=self._router.refused, num_peers=len(self.allow_list.names))
        self.address = bind(self._socket, interface)
        self._endpoint = Endpoint(address=self.address, server_key=keys.public.decode())
        self._endpoint_file = run_folder / "endpoints" / f"{role}.json"
        publish_endpoint(self._endpoint_file, self._endpoint)

    @property
    def refused(self) -> collections.Counter[str]:
        self._rejected.count()
        return self._router.refused

    async def receive(self) -> list[tuple[str, Message]]:
        self._watch()
        await asyncio.sleep(0)  # peers that never pause must not keep the stages from running
        while not (arrived := self._take()):
            await self._readable.wait()
        return arrived

    def send(self, peer: str, message: Message) -> None:
        try:
            self._router.send(peer, message)
        finally:
            if self._loop is not None and not self._is_looking:  # one look behind any number of sends
                self._is_looking = True
                self._loop.call_soon(self._wake_if_readable)

    def dismiss(self, message: Message) -> None:
        self._router.send_all(message)
        publish_endpoint(self._endpoint_file, msgspec.structs.replace(self._endpoint, closing_message=encode(message)))

    def close(self) -> None:
        if self._socket.closed:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
            self._loop.remove_reader(self._rejected.descriptor)
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._rejected.close()
        self._socket.close(linger=LINGER_MS)
        self._authenticator.stop()
        self._context.term()

    def _watch(self) -> None:
        """Have the running loop watch the descriptor, and what peers owe."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._descriptor, self._wake_if_readable)
            self._loop.add_reader(self._rejected.descriptor, self._rejected.count)
            self._rejected.count()
            self._probe_timer = self._loop.call_later(PROBE_EVERY_S, self._probe)

    def _probe(self) -> None:
        assert self._loop is not None
        self._router.probe()
        self._rejected.count()
        self._wake_if_readable()
        self._probe_timer = self._loop.call_later(PROBE_EVERY_S, self._probe)

    def _wake_if_readable(self) -> None:
        self._is_looking = False
        if not self._socket.closed and self._socket.getsockopt(_EVENTS) & _POLLIN:  # pyright: ignore[reportOperatorIssue]
            self._readable.set()

    def _take(self) -> list[tuple[str, Message]]:
        """At most `MAX_BATCH` frames' messages. Answers sent on the way may swallow a signal: hence the look at the end of a batch."""
        arrived: list[tuple[str, Message]] = []
        for _ in range(MAX_BATCH):
            try:
                routing_id = self._socket.recv(_NOBLOCK)
            except zmq.Again:
                return arrived
            frame = self._socket.recv(copy=False)
            if frame.more:
                self._router.refused["malformed"] += 1
                self._drop_rest(frame)
                continue
            name = self.allow_list.names[frame.get("User-Id").encode()]  # pyright: ignore[reportAttributeAccessIssue]
            if (before := self._routes.get(name)) != routing_id:
                self._rejected.heard(int(frame.get(_SRCFD)))
                if routing_id not in self._former:  # over the newest connection over which it speaks it is answered
                    self._routes[name] = routing_id
                    if before is not None:
                        self._former.append(before)
            arrived += self._router.receive_frame(name, frame.buffer)
        self._readable.set()
        return arrived

    def _drop_rest(self, frame: zmq.Frame) -> None:
        while frame.more:
            frame = self._socket.recv(copy=False)

    def _carry(self, peer: str, frame: bytes) -> bool:
        route = self._routes.get(peer)
        if route is None:
            return False
        try:
            self._socket.send(route, _NOBLOCK_MORE)
            self._socket.send(frame, _NOBLOCK, copy=len(frame) < COPY_BELOW_BYTES)
            return True
        except zmq.ZMQError:
            return False


class ZmqLink:
    """A connected DEALER; see `transport.base.Link`. Belongs to one thread, but for `wake`."""

    def __init__(self, run_folder: Path, role: str, index: int, *, accepts: Any, deadline_s: float = 60.0) -> None:
        self.name = f"{role}-{index}"
        self._decoder: Decoder[Message] = Decoder(accepts)
        self._endpoint_file = run_folder / "endpoints" / f"{role}.json"
        self._endpoint = endpoint = read_endpoint(self._endpoint_file, deadline_s=deadline_s)
        keys = read_keys(run_folder, self.name)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _configure(self._socket, keys)
        try:
            self._socket.curve_serverkey = endpoint.server_key.encode()
            self._socket.connect(endpoint.address)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise ConfigError(f"cannot connect {self.name} to {endpoint.address}, which {role}.json names: {error.strerror}") from None
        register(run_folder, self.name)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bell_lock = threading.Lock()
        """Held while it rings, lest it be closed then, and its number be somebody else's."""
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._bell, zmq.POLLIN)
        self._session = Session("the orchestrator", transmit=self._transmit, introduction=lambda kept: kept)
        self._bodies: collections.deque[memoryview] = collections.deque()
        """Messages to be handed over, still encoded."""
        self._is_dismissed = False
        """The orchestrator's closing message was read where it was published."""
        self._heard_at = time.monotonic()
        self._silent_looks = 0
        self._next_probe = self._heard_at + PROBE_EVERY_S

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._heard_at

    @property
    def unacked_bytes(self) -> int:
        """Bytes of messages that the orchestrator has not acknowledged."""
        return self._session.unacked_bytes

    def introduce(self, make: Introduction) -> None:
        self._session.introduction = lambda kept: map(encode, make(kept))
        for message in make(()):
            self.send(message)

    def send(self, *messages: Message) -> None:
        self._session.send(*map(encode, messages))

    def receive(self, timeout_s: float) -> Message | None:
        until = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            if now >= self._next_probe:
                self._next_probe = now + PROBE_EVERY_S
                self._session.probe()
                self._look_for_successor()
            # Taking comes last before the wait: sending uses up the signal of what has arrived meanwhile.
            if (message := self._take()) is not None:
                return message
            left_s = min(until, self._next_probe) - time.monotonic()
            if timeout_s <= 0 or (left_s > 0 and self._is_woken(left_s)) or time.monotonic() >= until:
                return None

    def wake(self) -> None:
        with self._bell_lock:
            if not self._socket.closed:
                os.eventfd_write(self._bell, 1)

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def close(self) -> None:
        if self._socket.closed:
            return
        self._session.say_goodbye()
        self._socket.close(linger=LINGER_MS)
        self._context.term()
        with self._bell_lock:
            os.close(self._bell)

    def _look_for_successor(self) -> None:
        """Connect to the address published now, where the orchestrator is silent and it is another one."""
        if self.silent_s < SILENT_S:
            return
        try:
            endpoint = read_endpoint(self._endpoint_file, deadline_s=0.0)
            if endpoint.closing_message:
                self._receive_closing_message(endpoint.closing_message)
            elif endpoint != self._endpoint:
                self._connect(endpoint)
            else:
                self._silent_looks += 1
                if self.unacked_bytes and self._silent_looks > RENEW_AFTER:
                    self._connect(endpoint)
                self._session.send_ack()  # the connection may be a new one, and only who speaks on it can be answered
        except (PeerSilent, ConfigError, zmq.ZMQError):  # between two orchestrators there is none, or a damaged one: look again
            return

    def _receive_closing_message(self, body: bytes) -> None:
        """The orchestrator has ended, and its last word may have been lost on the way, or said before this peer was there."""
        if not self._is_dismissed:
            self._is_dismissed = True
            self._bodies.append(memoryview(body))

    def _connect(self, endpoint: Endpoint) -> None:
        """Connect to `endpoint` in place of the present one, which may be the same, and gone."""
        before, self._endpoint, self._silent_looks = self._endpoint, endpoint, 0
        with contextlib.suppress(zmq.ZMQError):  # given up already
            self._socket.disconnect(before.address)
        self._socket.connect(endpoint.address)

    def _take(self) -> Message | None:
        """The next message that has arrived, past frames that carry none; None where nothing is left."""
        while not self._bodies:
            try:
                frame = self._socket.recv(_NOBLOCK, copy=False)
            except zmq.Again:
                return None
            self._heard_at, self._silent_looks = time.monotonic(), 0
            self._bodies += self._session.receive_frame(frame.buffer)
        return self._decoder.decode(self._bodies.popleft())

    def _is_woken(self, timeout_s: float) -> bool:
        """Wait for a frame, a bell or the time; True for the bell."""
        if not any(source == self._bell for source, _ in self._poller.poll(max(1, round(timeout_s * 1000)))):
            return False
        os.eventfd_read(self._bell)
        return True

    def _transmit(self, frame: bytes) -> None:
        try:  # noqa: SIM105 a third of the time of `contextlib.suppress`, for every message
            self._socket.send(frame, _NOBLOCK, copy=len(frame) < COPY_BELOW_BYTES)
        except zmq.Again:  # without a connection; what is kept is sent again once there is one
            pass


def _configure(socket: zmq.Socket[bytes], keys: KeyPair) -> None:
    _keep_freed_memory()
    configure(socket, keys, max_bytes=MAX_MESSAGE_BYTES + OVERHEAD_BYTES)
    socket.reconnect_ivl, socket.reconnect_ivl_max = 50, 2000


def _keep_freed_memory() -> None:
    """Have the C library keep up to `FREE_BYTES` that this process has freed, where it can be told so (glibc).

    By itself it gives memory back with every burst of frames that has gone, and faults it in again, page by page, for the next one.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, FREE_BYTES)
