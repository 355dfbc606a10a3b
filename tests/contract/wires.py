"""The transports under test, each with ways to connect, and the messages and waits that their contract tests share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

import zmq

from pipelinerl.messages import EngineLoad, FromEngine, Message, Stop, ToEngine, Unread
from pipelinerl.transport.base import Hub, Link
from pipelinerl.transport.keys import KeyPair, make_keys, read_keys
from pipelinerl.transport.session import Session
from pipelinerl.transport.zmq import ZmqHub, ZmqLink
from tests.keys import PEERS
from tests.sim.memory import MemoryHub, NetworkFaults

PATIENCE_S = 20.0
"""After so long a message that should come is lost. Generous: the machine may be busy with something else."""


class Wire(Protocol):
    """A hub for engines, and ways to connect to it."""

    @property
    def hub(self) -> Hub: ...

    def link(self, number: int) -> Link:
        """Connect `engine-<number>`."""
        ...

    def send_raw(self, name: str, *frames: bytes) -> None:
        """Send bytes as they are over a connection of their own."""
        ...

    def close(self) -> None: ...


class MemoryWire:
    def __init__(self, folder: Path, *, network: NetworkFaults | None = None) -> None:
        self.hub = MemoryHub(accepts=FromEngine, **({} if network is None else {"network": network}))

    def link(self, number: int) -> Link:
        return self.hub.connect(f"engine-{number}", accepts=ToEngine)

    def send_raw(self, name: str, *frames: bytes) -> None:
        link = self.hub.connect(name, accepts=ToEngine)
        for frame in frames:
            link.send_frame(frame)

    def close(self) -> None:
        self.hub.close()


class ZmqWire:
    def __init__(self, folder: Path) -> None:
        make_keys(folder, PEERS)
        self.folder = folder
        self.hub = ZmqHub(folder, "engine", accepts=FromEngine)
        self._links: list[ZmqLink] = []
        self._context = zmq.Context()
        self._dealers: list[zmq.Socket[bytes]] = []

    def link(self, number: int) -> ZmqLink:
        self._links.append(ZmqLink(self.folder, "engine", number, accepts=ToEngine))
        return self._links[-1]

    def send_raw(self, name: str, *frames: bytes) -> None:
        socket = self.dealer(name.encode(), keys=read_keys(self.folder, name))
        for frame in frames:
            socket.send(frame)

    def dealer(
        self, name: bytes, *, keys: KeyPair | None, server_key: bytes | None = None, reconnects: bool = True, hwm: int = 1000
    ) -> zmq.Socket[bytes]:
        """A socket of somebody who does not use our link; without keys it does not even try to encrypt."""
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.sndhwm = hwm
        socket.reconnect_ivl = 100 if reconnects else -1
        socket.routing_id = name
        if keys is not None:
            socket.curve_serverkey = server_key or read_keys(self.folder, "orchestrator").public
            socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        socket.connect(self.hub.address)
        self._dealers.append(socket)
        return socket

    def close(self) -> None:
        for link in self._links:
            link.close()
        self.hub.close()
        self._context.destroy(linger=0)


Program = Callable[[Any], Coroutine[Any, Any, None]]


def run(wire: Callable[[Path], Wire], folder: Path, program: Program) -> None:
    """Run a program with a fresh wire and close whatever is open."""

    async def whole() -> None:
        made = wire(folder)
        with contextlib.closing(made):
            await program(made)

    asyncio.run(whole())


def load(number: int) -> EngineLoad:
    return EngineLoad(engine_id=0, version=0, num_running=0, num_waiting=0, num_tokens=number, num_steps=0, busy_s=0.0, idle_s=0.0)


def numbers(arrived: list[tuple[str, Message]], *, peer: str | None = None) -> list[int]:
    """Of the loads that arrived, from one peer or all."""
    return [message.num_tokens for name, message in arrived if isinstance(message, EngineLoad) and peer in (None, name)]


def framed(*bodies: bytes) -> list[bytes]:
    """Messages as an end sends them that has not heard from anybody yet: each behind its header, numbered from 1."""
    frames: list[bytes] = []
    session = Session("the orchestrator", transmit=frames.append, introduction=lambda kept: kept)
    for body in bodies:
        session.send(body)
    return frames


async def arrivals(hub: Hub, count: int) -> list[tuple[str, Message]]:
    """The next `count` messages at the hub; what could not be read is none."""
    arrived: list[tuple[str, Message]] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(arrived) < count:
            arrived += [each for each in await hub.receive() if not isinstance(each[1], Unread)]
    assert len(arrived) == count, f"{len(arrived)} came, {count} were sent"
    return arrived


async def payload(link: Link) -> Message:
    """The next message at a link."""
    end = time.monotonic() + PATIENCE_S
    while (message := link.receive(0.0)) is None:
        assert time.monotonic() < end, f"nothing came to {link.name}"
        await asyncio.sleep(0.002)
    return message


async def until(claim: Callable[[], bool], *, what: str) -> None:
    """Wait for something that has no message."""
    end = time.monotonic() + PATIENCE_S
    while not claim():
        assert time.monotonic() < end, f"waited {PATIENCE_S:g} s: {what}"
        await asyncio.sleep(0.01)


async def send_until_refused(hub: Hub, peer: str) -> None:
    """Send for some seconds: that a connection was closed is noticed a moment later."""
    for _ in range(1000):
        hub.send(peer, Stop(reason="finished"))
        await asyncio.sleep(0.01)


async def connected(wire: Wire, *numbers: int) -> list[Link]:
    """Links that have been heard of: a hub can send to a peer only then."""
    links = [wire.link(number) for number in numbers]
    for link in links:
        link.send(load(-1))
    await arrivals(wire.hub, len(links))
    return links
