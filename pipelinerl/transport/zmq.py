"""ZeroMQ over TCP: a ROUTER in the orchestrator, a DEALER in each peer, CURVE on both.

The hub binds first, to a port the system picks, and then publishes it in `<run>/endpoints/<role>.json`; no port is fixed, none can be
taken in between. High-water marks are off: ZeroMQ would drop silently at them, so what is outstanding is bounded above this layer.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import zmq
import zmq.auth.thread

from pipelinerl.errors import PeerGone, WireError
from pipelinerl.messages import Message
from pipelinerl.stages import Signal
from pipelinerl.transport.codec import MAX_MESSAGE_BYTES, Decoder, encode
from pipelinerl.transport.curve import AllowList, read_keys
from pipelinerl.watch import wait_for_file

LINGER_MS = 1000
"""How long a closing socket tries to deliver what was sent. Longer delays the end of a run whose peer is dead."""


class ZmqHub:
    """A bound ROUTER for one kind of peer; see `transport.base.Hub`.

    ZeroMQ's descriptor only says that something changed since the socket was last touched, and sending touches it too: a message that
    arrives during a send raises no further signal. So both the descriptor and every send look whether there is something to read.
    """

    def __init__(self, run_folder: Path, role: str, *, accepts: Any, interface: str = "127.0.0.1") -> None:
        self.num_refused = 0
        self._role = role
        self._decoder = Decoder(accepts)
        self._context = zmq.Context()
        self.allow_list = AllowList(frozenset({read_keys(run_folder, role).public}))
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self.allow_list)
        keys = read_keys(run_folder, "orchestrator")
        self._readable = Signal()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop that watches the descriptor, from the first `receive` on."""
        self._socket = self._context.socket(zmq.ROUTER)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        _configure(self._socket)
        self._socket.router_mandatory = True
        self._socket.router_handover = True
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
        self._socket.bind(f"tcp://{interface}:0")
        self.address = bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()  # pyright: ignore[reportArgumentType]
        _publish(run_folder / "endpoints" / f"{role}.json", {"address": self.address, "server_key": keys.public.decode()})

    async def receive(self) -> list[tuple[str, Message]]:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._descriptor, self._wake_if_readable)
        while not (arrived := self._take_all()):
            await self._readable.wait()
        return arrived

    def send(self, peer: str, message: Message) -> None:
        try:
            self._socket.send_multipart((peer.encode(), encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise PeerGone(f"cannot send {type(message).__name__} to {peer}: {error.strerror}; its connection is closed") from error
        finally:
            self._wake_if_readable()

    def close(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=LINGER_MS)
        self._authenticator.stop()
        self._context.term()

    def _wake_if_readable(self) -> None:
        if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # pyright: ignore[reportOperatorIssue]
            self._readable.set()

    def _take_all(self) -> list[tuple[str, Message]]:
        arrived: list[tuple[str, Message]] = []
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return arrived
            if (message := self._accept(frames)) is not None:
                arrived.append(message)

    def _accept(self, frames: list[Any]) -> tuple[str, Message] | None:
        try:
            if len(frames) != 2:
                raise WireError(f"{len(frames)} frames, expected a name and a message")
            return bytes(frames[0].buffer).decode(), self._decoder.decode(frames[1].buffer)
        except (WireError, UnicodeDecodeError):
            self.num_refused += 1
            return None


class ZmqLink:
    """A connected DEALER; see `transport.base.Link`. Belongs to one thread."""

    def __init__(self, run_folder: Path, role: str, index: int, *, accepts: Any, deadline_s: float = 60.0) -> None:
        self.name = f"{role}-{index}"
        self._decoder = Decoder(accepts)
        endpoint = json.loads(wait_for_file(run_folder / "endpoints" / f"{role}.json", peer="orchestrator", deadline_s=deadline_s))
        keys = read_keys(run_folder, role)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _configure(self._socket)
        self._socket.routing_id = self.name.encode()
        self._socket.curve_serverkey = endpoint["server_key"].encode()
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
        self._socket.connect(endpoint["address"])

    def send(self, message: Message) -> None:
        self._socket.send(encode(message), zmq.NOBLOCK)

    def receive(self, timeout_s: float) -> Message | None:
        try:
            return self._decoder.decode(self._socket.recv(zmq.NOBLOCK, copy=False).buffer)
        except zmq.Again:
            if timeout_s <= 0 or not self._socket.poll(max(1, round(timeout_s * 1000))):
                return None
            return self._decoder.decode(self._socket.recv(copy=False).buffer)

    def close(self) -> None:
        self._socket.close(linger=LINGER_MS)
        self._context.term()


def _configure(socket: zmq.Socket[bytes]) -> None:
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.heartbeat_ivl, socket.heartbeat_timeout = 5000, 30000
    socket.reconnect_ivl, socket.reconnect_ivl_max = 50, 2000


def _publish(path: Path, content: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content))
    os.replace(draft, path)
