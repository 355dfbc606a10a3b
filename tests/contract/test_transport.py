"""What every transport promises, over ZeroMQ on real sockets and over its in-process twin; and what only ZeroMQ can: who gets in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import zmq

from pipelinerl.errors import ConfigError, PeerGone, PeerSilent
from pipelinerl.messages import (
    Completion,
    EngineLoad,
    Failed,
    Finish,
    FromEngine,
    Generate,
    Message,
    Sampling,
    StageWeights,
    Stop,
    ToEngine,
)
from pipelinerl.transport import codec
from pipelinerl.transport import zmq as zmq_transport
from pipelinerl.transport.base import Hub, Link
from pipelinerl.transport.codec import encode
from pipelinerl.transport.curve import KeyPair, make_keys, read_keys
from pipelinerl.transport.memory import MemoryHub
from pipelinerl.transport.zmq import ZmqHub, ZmqLink

PATIENCE_S = 20.0
"""After so long a message that should come is lost. Generous: the machine may be busy with something else."""


class Wire(Protocol):
    """A hub for engines, and ways to connect to it."""

    @property
    def hub(self) -> Hub: ...

    def link(self, number: int) -> Link:
        """Connect `engine-<number>`."""
        ...

    def send_raw(self, number: int, *frames: bytes) -> None:
        """Send bytes as they are, as `engine-<number>`, over a connection of their own."""
        ...

    def close(self) -> None: ...


class MemoryWire:
    def __init__(self, folder: Path) -> None:
        self.hub = MemoryHub(accepts=FromEngine)

    def link(self, number: int) -> Link:
        return self.hub.connect(f"engine-{number}", accepts=ToEngine)

    def send_raw(self, number: int, *frames: bytes) -> None:
        link = self.hub.connect(f"engine-{number}", accepts=ToEngine)
        for frame in frames:
            link.send_frame(frame)

    def close(self) -> None:
        self.hub.close()


class ZmqWire:
    def __init__(self, folder: Path) -> None:
        make_keys(folder)
        self.folder = folder
        self.hub = ZmqHub(folder, "engine", accepts=FromEngine)
        self._links: list[ZmqLink] = []
        self._context = zmq.Context()
        self._dealers: list[zmq.Socket[bytes]] = []

    def link(self, number: int) -> ZmqLink:
        self._links.append(ZmqLink(self.folder, "engine", number, accepts=ToEngine))
        return self._links[-1]

    def send_raw(self, number: int, *frames: bytes) -> None:
        socket = self.dealer(b"engine-%d" % number, keys=read_keys(self.folder, "engine"))
        for frame in frames:
            socket.send(frame)

    def dealer(self, name: bytes, *, keys: KeyPair | None, server_key: bytes | None = None, reconnects: bool = True) -> zmq.Socket[bytes]:
        """A socket of somebody who does not use our link; without keys it does not even try to encrypt."""
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
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


@pytest.fixture(params=[MemoryWire, ZmqWire], ids=["memory", "zmq"])
def on_wire(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Program], None]:
    """Run a program over the transport under test."""
    return lambda program: run(request.param, tmp_path, program)


@pytest.fixture
def on_zmq(tmp_path: Path) -> Callable[[Program], None]:
    return lambda program: run(ZmqWire, tmp_path, program)


def load(number: int) -> EngineLoad:
    return EngineLoad(engine_id=0, version=0, num_running=0, num_waiting=0, num_tokens=number, num_steps=0, busy_s=0.0, idle_s=0.0)


async def arrivals(hub: Hub, count: int) -> list[tuple[str, Message]]:
    """The next `count` messages at the hub."""
    arrived: list[tuple[str, Message]] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(arrived) < count:
            arrived += await hub.receive()
    assert len(arrived) == count, f"{len(arrived)} came, {count} were sent"
    return arrived


async def arrival(link: Link) -> Message:
    """The next message at a link."""
    end = time.monotonic() + PATIENCE_S
    while (message := link.receive(0.0)) is None:
        assert time.monotonic() < end, f"nothing came to {link.name}"
        await asyncio.sleep(0.002)
    return message


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


def test_messages_arrive_whole_and_in_order_in_both_directions(on_wire: Callable[[Program], None]):
    async def program(wire: Wire) -> None:
        (link,) = await connected(wire, 0)
        for number in range(500):
            link.send(load(number))
            wire.hub.send("engine-0", StageWeights(version=number, slot="s" * number, digest=""))
        assert [message.num_tokens for _, message in await arrivals(wire.hub, 500) if isinstance(message, EngineLoad)] == list(range(500))
        orders = [await arrival(link) for _ in range(500)]
        assert [(order.version, len(order.slot)) for order in orders if isinstance(order, StageWeights)] == [(n, n) for n in range(500)]

    on_wire(program)


def test_several_peers_are_told_apart_and_each_keeps_its_order(on_wire: Callable[[Program], None]):
    async def program(wire: Wire) -> None:
        links = await connected(wire, 0, 1, 2)
        for number in range(100):
            for link in links:
                link.send(load(number))
            wire.hub.send(f"engine-{number % 3}", StageWeights(version=number, slot="", digest=""))
        arrived = await arrivals(wire.hub, 300)
        for name in ("engine-0", "engine-1", "engine-2"):
            assert [message.num_tokens for peer, message in arrived if peer == name and isinstance(message, EngineLoad)] == list(range(100))
        assert [order.version for order in [await arrival(links[1]) for _ in range(33)] if isinstance(order, StageWeights)] == list(
            range(1, 100, 3)
        )

    on_wire(program)


def test_columns_survive_the_journey(on_wire: Callable[[Program], None]):
    async def program(wire: Wire) -> None:
        (link,) = await connected(wire, 0)
        wire.hub.send(
            "engine-0",
            Generate(rollout_id="a", attempt=1, token_ids=np.array([5, 6], np.int32), sampling=Sampling(max_tokens=3, seed=4)),
        )
        request = await arrival(link)
        assert isinstance(request, Generate)
        assert (request.token_ids.tolist(), request.token_ids.dtype, request.sampling.seed) == ([5, 6], np.int32, 4)

    on_wire(program)


def test_a_message_of_20_megabytes_arrives_whole(on_wire: Callable[[Program], None]):
    count = 1_750_000  # 12 bytes for each token
    ids = np.random.default_rng(0).integers(0, 1 << 30, size=count, dtype=np.int32)

    async def program(wire: Wire) -> None:
        (link,) = await connected(wire, 0)
        link.send(
            Completion(
                rollout_id="long",
                attempt=0,
                token_ids=ids,
                logprobs=np.zeros(count, np.float32),
                versions=np.zeros(count, np.int32),
                finish=Finish.STOP,
            )
        )
        link.send(load(7))
        (_, long), (_, behind) = await arrivals(wire.hub, 2)
        assert isinstance(long, Completion)
        assert np.array_equal(long.token_ids, ids)
        assert behind == load(7)

    on_wire(program)


def test_sending_to_somebody_who_never_connected_raises(on_wire: Callable[[Program], None]):
    async def program(wire: Wire) -> None:
        await connected(wire, 0)
        with pytest.raises(PeerGone, match=r"cannot send Stop to engine-9: .*connection is closed"):
            wire.hub.send("engine-9", Stop(reason="finished"))

    on_wire(program)


def test_sending_to_somebody_who_has_left_raises_and_the_others_are_unharmed(on_wire: Callable[[Program], None]):
    async def program(wire: Wire) -> None:
        first, second = await connected(wire, 0, 1)
        first.close()
        with pytest.raises(PeerGone, match="engine-0"):
            await send_until_refused(wire.hub, "engine-0")
        wire.hub.send("engine-1", Stop(reason="finished"))
        assert await arrival(second) == Stop(reason="finished")

    on_wire(program)


def test_who_comes_back_under_the_same_name_takes_over(on_wire: Callable[[Program], None]):
    async def program(wire: Wire) -> None:
        (old,) = await connected(wire, 0)
        old.close()
        (new,) = await connected(wire, 0)
        wire.hub.send("engine-0", Stop(reason="hello again"))
        assert await arrival(new) == Stop(reason="hello again")
        new.send(load(3))
        assert await arrivals(wire.hub, 1) == [("engine-0", load(3))]

    on_wire(program)


BAD_FRAMES = {
    "nothing": b"",
    "noise": b"\xc1\xc1\xc1",
    "a message the orchestrator would send": encode(Stop(reason="no")),
    "half a message": encode(load(1))[:20],
    "a pickle": pickle.dumps({"type": "EngineLoad"}),
    "text": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_bytes_that_are_no_accepted_message_are_counted_and_dropped(on_wire: Callable[[Program], None], name: str):
    async def program(wire: Wire) -> None:
        (good,) = await connected(wire, 0)
        wire.send_raw(1, encode(load(1)), BAD_FRAMES[name], BAD_FRAMES[name], encode(load(2)))
        arrived = await arrivals(wire.hub, 2)
        assert arrived == [("engine-1", load(1)), ("engine-1", load(2))], "the good ones of the same peer pass"
        assert wire.hub.num_refused == 2
        good.send(load(3))
        assert await arrivals(wire.hub, 1) == [("engine-0", load(3))]

    on_wire(program)


def test_a_message_over_the_limit_is_counted_and_dropped(on_wire: Callable[[Program], None], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 100_000)

    async def program(wire: Wire) -> None:
        (link,) = await connected(wire, 0)
        link.send(Failed(error="x" * 100_001))
        link.send(load(1))
        assert await arrivals(wire.hub, 1) == [("engine-0", load(1))]
        assert wire.hub.num_refused == 1

    on_wire(program)


def test_what_was_sent_before_closing_arrives(on_wire: Callable[[Program], None]):
    async def program(wire: Wire) -> None:
        leaving, staying = await connected(wire, 0, 1)
        for number in range(200):
            leaving.send(load(number))
        leaving.close()
        assert [message.num_tokens for _, message in await arrivals(wire.hub, 200) if isinstance(message, EngineLoad)] == list(range(200))
        for number in range(200):
            wire.hub.send("engine-1", StageWeights(version=number, slot="", digest=""))
        wire.hub.close()
        orders = [await arrival(staying) for _ in range(200)]
        assert [order.version for order in orders if isinstance(order, StageWeights)] == list(range(200))

    on_wire(program)


def test_waiting_for_a_message_can_be_cancelled_without_losing_one(on_wire: Callable[[Program], None]):
    async def program(wire: Wire) -> None:
        (link,) = await connected(wire, 0)
        for number in range(20):
            waiting = asyncio.create_task(wire.hub.receive())
            await asyncio.sleep(0.002)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            link.send(load(number))
            assert await arrivals(wire.hub, 1) == [("engine-0", load(number))]

    on_wire(program)


@pytest.mark.parametrize("receiver", ["engine-0", "engine-9"])
def test_a_message_that_arrives_while_the_hub_sends_is_received(on_wire: Callable[[Program], None], receiver: str):
    """Sending makes ZeroMQ look at its connections, which must not swallow the news that something arrived; nor must a failed send."""

    async def program(wire: Wire) -> None:
        (link,) = await connected(wire, 0)
        for number in range(3):
            waiting = asyncio.create_task(wire.hub.receive())
            await asyncio.sleep(0.01)
            link.send(load(number))
            time.sleep(0.05)  # noqa: ASYNC251 the loop is busy with something else while the message arrives
            with contextlib.suppress(PeerGone):
                wire.hub.send(receiver, Stop(reason=""))
            assert await asyncio.wait_for(waiting, PATIENCE_S / 4) == [("engine-0", load(number))]

    on_wire(program)


def test_an_empty_link_returns_none_after_its_timeout(on_zmq: Callable[[Program], None]):
    async def program(wire: Wire) -> None:
        (link,) = await connected(wire, 0)
        assert link.receive(0.0) is None
        started = time.monotonic()
        assert link.receive(0.1) is None
        assert 0.09 <= time.monotonic() - started < 5.0
        wire.hub.send("engine-0", Stop(reason="x"))
        assert link.receive(PATIENCE_S) == Stop(reason="x")

    on_zmq(program)


# --- ZeroMQ: who gets in ---------------------------------------------------------------------------------------------------------


def new_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public=public, secret=secret)


def strangers(wire: ZmqWire) -> dict[str, tuple[KeyPair | None, bytes | None]]:
    """Keys of those who must stay outside, and the server key they believe in."""
    return {
        "a key of its own": (new_pair(), None),
        "the key of another role": (read_keys(wire.folder, "scorer"), None),
        "a public key without its secret": (
            KeyPair(public=read_keys(wire.folder, "engine").public, secret=new_pair().secret),
            None,
        ),
        "the right key for another server": (read_keys(wire.folder, "engine"), new_pair().public),
        "no key": (None, None),
    }


COUNTED = ("a key of its own", "the key of another role")


@pytest.mark.parametrize(
    "name", ["a key of its own", "the key of another role", "a public key without its secret", "the right key for another server", "no key"]
)
def test_a_stranger_never_gets_through_while_those_with_a_key_do(on_zmq: Callable[[Program], None], name: str):
    async def program(wire: ZmqWire) -> None:
        keys, server_key = strangers(wire)[name]
        (good,) = await connected(wire, 0)
        stranger = wire.dealer(b"engine-1", keys=keys, server_key=server_key)
        stranger.send(encode(load(666)))
        end = time.monotonic() + PATIENCE_S
        while name in COUNTED and not wire.hub.allow_list.num_turned_away:
            assert time.monotonic() < end, "a wrong key was not counted"
            await asyncio.sleep(0.01)
        arrived = []
        for number in range(30):
            good.send(load(number))
            arrived += await arrivals(wire.hub, 1)
            with pytest.raises(PeerGone):
                wire.hub.send("engine-1", Stop(reason="come in"))
            await asyncio.sleep(0.01)
        assert {peer for peer, _ in arrived} == {"engine-0"}
        assert not stranger.poll(0)

    on_zmq(program)


def test_a_peer_takes_over_from_its_own_dead_connection(on_zmq: Callable[[Program], None]):
    """As after a crash of its machine: the old connection was never closed and still stands under the name."""

    async def program(wire: ZmqWire) -> None:
        dead = wire.dealer(b"engine-0", keys=read_keys(wire.folder, "engine"), reconnects=False)
        dead.send(encode(load(1)))
        assert await arrivals(wire.hub, 1) == [("engine-0", load(1))]
        (restarted,) = await connected(wire, 0)
        wire.hub.send("engine-0", Stop(reason="hello again"))
        assert await arrival(restarted) == Stop(reason="hello again")

    on_zmq(program)


def test_an_empty_allow_list_lets_nobody_in(on_zmq: Callable[[Program], None]):
    async def program(wire: ZmqWire) -> None:
        wire.hub.allow_list.allowed = frozenset()
        link = wire.link(0)
        link.send(load(1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wire.hub.receive(), 0.5)
        assert wire.hub.allow_list.num_turned_away >= 1

    on_zmq(program)


@pytest.mark.parametrize("frames", [[], [b"one", b"too many"]], ids=["no message", "two messages"])
def test_a_message_in_any_number_of_frames_but_one_is_counted_and_dropped(on_zmq: Callable[[Program], None], frames: list[bytes]):
    async def program(wire: ZmqWire) -> None:
        raw = wire.dealer(b"engine-0", keys=read_keys(wire.folder, "engine"))
        if frames:
            raw.send_multipart(frames)
        else:
            raw.send_multipart([b"", encode(load(1)), b""])
        raw.send(encode(load(2)))
        assert await arrivals(wire.hub, 1) == [("engine-0", load(2))]
        assert wire.hub.num_refused == 1

    on_zmq(program)


def test_a_name_that_is_no_text_is_counted_and_dropped(on_zmq: Callable[[Program], None]):
    async def program(wire: ZmqWire) -> None:
        raw = wire.dealer(b"\xff\xfe", keys=read_keys(wire.folder, "engine"))
        raw.send(encode(load(1)))
        link = wire.link(0)
        end = time.monotonic() + PATIENCE_S
        while not wire.hub.num_refused:
            assert time.monotonic() < end
            link.send(load(2))
            assert {peer for peer, _ in await asyncio.wait_for(wire.hub.receive(), PATIENCE_S)} == {"engine-0"}
            await asyncio.sleep(0.01)

    on_zmq(program)


def test_a_message_over_the_sockets_limit_costs_its_sender_that_connection_and_nobody_else(
    on_zmq: Callable[[Program], None], monkeypatch: pytest.MonkeyPatch
):
    """ZeroMQ closes the connection before the bytes are in memory; the sender connects again by itself."""
    monkeypatch.setattr(zmq_transport, "MAX_MESSAGE_BYTES", 100_000)

    async def program(wire: ZmqWire) -> None:
        good, flooding = await connected(wire, 0, 1)
        flooding.send(Failed(error="x" * 200_000))
        for number in range(20):
            good.send(load(number))
            assert await arrivals(wire.hub, 1) == [("engine-0", load(number))]
            await asyncio.sleep(0.01)
        flooding.send(load(99))
        assert await arrivals(wire.hub, 1) == [("engine-1", load(99))]

    on_zmq(program)


def test_the_hub_listens_on_loopback_and_on_a_port_of_its_own(tmp_path: Path):
    async def program(wire: ZmqWire) -> None:
        second = ZmqHub(wire.folder, "scorer", accepts=FromEngine)
        second.close()
        assert wire.hub.address.startswith("tcp://127.0.0.1:")
        assert second.address != wire.hub.address
        published = json.loads((tmp_path / "endpoints" / "engine.json").read_text())
        assert published == {"address": wire.hub.address, "server_key": read_keys(tmp_path, "orchestrator").public.decode()}
        assert read_keys(tmp_path, "orchestrator").secret not in (tmp_path / "endpoints" / "engine.json").read_bytes()

    run(ZmqWire, tmp_path, program)


def test_keys_are_their_owners_alone_and_no_secret_shows_in_a_repr(tmp_path: Path):
    make_keys(tmp_path)
    for role in ("orchestrator", "engine", "scorer", "trainer"):
        assert (tmp_path / "keys" / f"{role}.key").stat().st_mode & 0o777 == 0o600
        pair = read_keys(tmp_path, role)
        assert pair.secret.decode() not in repr(pair)
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    assert len({read_keys(tmp_path, role).public for role in ("orchestrator", "engine", "scorer", "trainer")}) == 4


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_keys_that_others_can_read_are_refused(tmp_path: Path, mode: int):
    make_keys(tmp_path)
    os.chmod(tmp_path / "keys" / "engine.key", mode)
    with pytest.raises(ConfigError, match=rf"engine.key has mode {mode:o}: others can read this run's key; run `chmod 600"):
        read_keys(tmp_path, "engine")


@pytest.mark.parametrize("content", [b"", b"a" * 40, b"a" * 40 + b"\n" + b"b" * 39, b"a" * 40 + b"\n" + b"b" * 40 + b"\n" + b"c" * 40])
def test_a_file_that_is_no_key_pair_is_refused(tmp_path: Path, content: bytes):
    make_keys(tmp_path)
    (tmp_path / "keys" / "engine.key").write_bytes(content)
    with pytest.raises(ConfigError, match="is not a key pair"):
        read_keys(tmp_path, "engine")


def test_a_missing_key_says_how_to_make_one(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no key for engine at .*make keys with `pipelinerl keys"):
        read_keys(tmp_path, "engine")


def test_a_link_whose_hub_never_comes_names_the_orchestrator(tmp_path: Path):
    make_keys(tmp_path)
    with pytest.raises(PeerSilent, match="for orchestrator to write"):
        ZmqLink(tmp_path, "engine", 0, accepts=ToEngine, deadline_s=0.05)
