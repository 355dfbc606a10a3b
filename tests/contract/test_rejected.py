"""Who gets in over ZeroMQ: those whose key is on the list, and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from pipelinerl.errors import PeerGone, PeerSilent
from pipelinerl.messages import FromEngine, Stop, ToEngine
from pipelinerl.transport import curve
from pipelinerl.transport.codec import encode
from pipelinerl.transport.keys import KeyPair, make_keys, read_keys
from pipelinerl.transport.zmq import ZmqHub, ZmqLink
from tests.contract.wires import Program, ZmqWire, arrivals, connected, framed, load, payload, run, until
from tests.keys import PEERS

NUM_IDLE = 200


def new_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public=public, secret=secret)


def strangers(wire: ZmqWire) -> dict[str, tuple[KeyPair | None, bytes | None]]:
    """Keys of those who must stay outside, and the server key they believe in."""
    return {
        "a key of its own": (new_pair(), None),
        "the key of another role": (read_keys(wire.folder, "scorer-0"), None),
        "a public key without its secret": (
            KeyPair(public=read_keys(wire.folder, "engine-1").public, secret=new_pair().secret),
            None,
        ),
        "the right key for another server": (read_keys(wire.folder, "engine-1"), new_pair().public),
        "no key": (None, None),
    }


@pytest.mark.parametrize(
    "name", ["a key of its own", "the key of another role", "a public key without its secret", "the right key for another server", "no key"]
)
def test_a_stranger_costs_one_counter_and_never_gets_through_while_those_with_a_key_do(on_zmq: Callable[[Program], None], name: str):
    async def program(wire: ZmqWire) -> None:
        keys, server_key = strangers(wire)[name]
        (good,) = await connected(wire, 0)
        stranger = wire.dealer(b"engine-1", keys=keys, server_key=server_key, reconnects=False)
        stranger.send(framed(encode(load(666)))[0])
        await until(lambda: wire.hub.refused["unauthenticated"] > 0, what="a stranger was not counted")
        arrived = []
        for number in range(30):
            good.send(load(number))
            arrived += await arrivals(wire.hub, 1)
            with pytest.raises(PeerGone):
                wire.hub.send("engine-1", Stop(reason="come in"))
            await asyncio.sleep(0.01)
        assert {peer for peer, _ in arrived} == {"engine-0"}
        assert not stranger.poll(0)
        assert wire.hub.refused == {"unauthenticated": 1}

    on_zmq(program)


def test_connections_that_say_nothing_are_closed_and_counted_while_peers_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Half of them send half a greeting: neither is ever a peer."""
    monkeypatch.setattr(curve, "HANDSHAKE_MS", 500)

    async def program(wire: ZmqWire) -> None:
        (good,) = await connected(wire, 0)
        host, _, port = wire.hub.address.removeprefix("tcp://").partition(":")
        with contextlib.ExitStack() as idle:
            for number in range(NUM_IDLE):
                stranger = idle.enter_context(socket.create_connection((host, int(port))))
                if number % 2:
                    stranger.sendall(b"\xff\0\0\0\0")
            for number in range(20):
                good.send(load(number))
                assert await arrivals(wire.hub, 1) == [("engine-0", load(number))]
            await until(lambda: wire.hub.refused["unauthenticated"] == NUM_IDLE, what="strangers keep their connections")
            good.send(load(99))
            assert await arrivals(wire.hub, 1) == [("engine-0", load(99))]

    run(ZmqWire, tmp_path, program)


def test_a_peer_takes_over_from_its_own_dead_connection(on_zmq: Callable[[Program], None]):
    """As after a crash of its machine: the old connection was never closed and still stands under the name."""

    async def program(wire: ZmqWire) -> None:
        dead = wire.dealer(b"anything", keys=read_keys(wire.folder, "engine-0"), reconnects=False)
        dead.send(framed(encode(load(1)))[0])
        assert await arrivals(wire.hub, 1) == [("engine-0", load(1))]
        (restarted,) = await connected(wire, 0)
        wire.hub.send("engine-0", Stop(reason="hello again"))
        assert await payload(restarted) == Stop(reason="hello again")

    on_zmq(program)


def test_an_empty_allow_list_lets_nobody_in(on_zmq: Callable[[Program], None]):
    async def program(wire: ZmqWire) -> None:
        wire.hub.allow_list.names = {}
        link = wire.link(0)
        link.send(load(1))
        receiving = asyncio.create_task(wire.hub.receive())
        await until(lambda: wire.hub.refused["unauthenticated"] >= 1, what="nobody was turned away")
        assert not receiving.done()
        receiving.cancel()

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


def test_a_link_whose_hub_never_comes_names_the_orchestrator(tmp_path: Path):
    make_keys(tmp_path, PEERS)
    with pytest.raises(PeerSilent, match="for orchestrator to write"):
        ZmqLink(tmp_path, "engine", 0, accepts=ToEngine, deadline_s=0.05)
