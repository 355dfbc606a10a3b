"""A connection that breaks, a network that loses, a peer that stands still, one that is gone: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pipelinerl.errors import PeerFull, PeerGone
from pipelinerl.messages import FromEngine, Message, StageWeights, Stop, ToEngine
from pipelinerl.transport import router, session
from pipelinerl.transport import zmq as zmq_transport
from pipelinerl.transport.base import Link
from pipelinerl.transport.zmq import ZmqHub
from tests.contract.wires import (
    PATIENCE_S,
    MemoryWire,
    Program,
    Wire,
    ZmqWire,
    arrivals,
    connected,
    load,
    numbers,
    payload,
    run,
    send_until_refused,
    until,
)
from tests.sim.clock import simulate
from tests.sim.memory import MemoryHub, NetworkFaults

pytestmark = pytest.mark.process

NETWORKS = {
    "lost": NetworkFaults(delay_s=0.01, drop_fraction=0.3, seed=1),
    "doubled": NetworkFaults(delay_s=0.01, repeat_fraction=0.5, seed=2),
    "reordered": NetworkFaults(jitter_s=0.5, reorders=True, seed=3),
    "everything": NetworkFaults(delay_s=0.05, jitter_s=1.0, drop_fraction=0.2, repeat_fraction=0.3, reorders=True, seed=4),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_over_any_network_every_message_arrives_once_and_in_order(network: str):
    async def program() -> None:
        hub = MemoryHub(accepts=FromEngine, network=NETWORKS[network])
        link = hub.connect("engine-0", accepts=ToEngine)
        orders: list[int] = []

        arrived: list[int] = []

        async def obey() -> None:
            while len(orders) < 300:
                order = await link.wait()
                assert isinstance(order, StageWeights)
                orders.append(order.version)

        async def listen() -> None:
            while True:
                arrived.extend(numbers(await hub.receive()))
                if len(arrived) >= 300:
                    complete.set()

        complete = asyncio.Event()
        async with asyncio.timeout(3600.0), asyncio.TaskGroup() as group:
            obeying = group.create_task(obey())
            listening = group.create_task(listen())
            for number in range(300):
                link.send(load(number))
                hub.send("engine-0", StageWeights(version=number, buffer="", digest=""))
                await asyncio.sleep(0.01)
            await complete.wait()
            await obeying
            listening.cancel()
        assert arrived == list(range(300))
        assert orders == list(range(300))

    simulate(program())


def send_for_ever(link: Link) -> None:
    while True:
        link.send(load(-1))


class Cable:
    """A way to the hub that can be cut and mended: passes bytes on, both ways, and drops what it holds when it is cut."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").partition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._is_cut = False
        self._spoiled: set[bool] = set()
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        self._is_cut = True
        for end in self._ends:
            _shut(end)

    def mend(self) -> None:
        self._is_cut = False

    def spoil(self, *, is_towards_hub: bool) -> None:
        """Change a byte of what passes next."""
        self._spoiled.add(is_towards_hub)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for end in self._ends:
            end.close()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut:
                near.close()
                continue
            far = socket.create_connection(self._target)
            self._ends += [near, far]
            for source, target, is_towards_hub in ((near, far, True), (far, near, False)):
                thread = threading.Thread(target=self._pass_on, args=(source, target, is_towards_hub), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_towards_hub: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_towards_hub in self._spoiled:
                    self._spoiled.discard(is_towards_hub)
                    data = data[:-1] + bytes([data[-1] ^ 0x55])
                target.sendall(data)
        _shut(source)
        _shut(target)


def laid_to(wire: ZmqWire) -> Cable:
    """A cable that whoever connects from now on takes."""
    cable = Cable(wire.hub.address)
    endpoint = wire.folder / "endpoints" / "engine.json"
    endpoint.write_text(endpoint.read_text().replace(wire.hub.address, cable.address))
    return cable


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("pause_s", [0.0, 1.0])
def test_what_a_broken_connection_lost_comes_again_once_it_is_back(
    on_zmq: Callable[[Program], None], monkeypatch: pytest.MonkeyPatch, pause_s: float
):
    monkeypatch.setattr(router, "LOST_FOR_S", 60.0)

    async def program(wire: ZmqWire) -> None:
        cable = laid_to(wire)
        (link,) = await connected(wire, 0)
        arrived: list[int] = []
        orders: list[Message] = []

        async def listen() -> None:
            while len(arrived) < 300:
                arrived.extend(numbers(await wire.hub.receive()))
            await wire.hub.receive()  # goes on answering

        def is_complete() -> bool:
            while (order := link.receive(0.0)) is not None:
                orders.append(order)
            return len(arrived) == len(orders) == 300

        listening = asyncio.create_task(listen())
        for number in range(300):
            link.send(load(number))
            wire.hub.send("engine-0", StageWeights(version=number, buffer="s" * 500, digest=""))
            if number in (100, 200):
                cable.cut()
                await asyncio.sleep(pause_s)
                cable.mend()
            await asyncio.sleep(0.001)
        await until(is_complete, what="what the broken connection lost did not come again")
        listening.cancel()
        assert arrived == list(range(300))
        assert [order.version for order in orders if isinstance(order, StageWeights)] == list(range(300))
        cable.close()

    on_zmq(program)


def test_the_last_word_comes_also_where_the_connection_is_cut_and_then_the_hub_closed(
    on_zmq: Callable[[Program], None], monkeypatch: pytest.MonkeyPatch
):
    for name, seconds in (("SILENT_S", 0.5), ("PROBE_EVERY_S", 0.1)):
        monkeypatch.setattr(zmq_transport, name, seconds)

    async def program(wire: ZmqWire) -> None:
        cable = laid_to(wire)
        (link,) = await connected(wire, 0)
        cable.cut()
        wire.hub.dismiss(Stop(reason="finished"))
        wire.hub.close()
        assert await payload(link) == Stop(reason="finished")
        assert link.receive(1.0) is None, "it was said twice"
        cable.close()

    on_zmq(program)


@pytest.mark.parametrize("is_towards_hub", [True, False])
def test_what_a_changed_byte_lost_comes_again(on_zmq: Callable[[Program], None], monkeypatch: pytest.MonkeyPatch, is_towards_hub: bool):
    """It cannot be decrypted, and ZeroMQ closes the connection: a peer's own for good, so the link connects anew."""
    for name, seconds in (("SILENT_S", 0.5), ("PROBE_EVERY_S", 0.5)):
        monkeypatch.setattr(zmq_transport, name, seconds)

    async def program(wire: ZmqWire) -> None:
        cable = laid_to(wire)
        (link,) = await connected(wire, 0)
        arrived: list[int] = []
        orders: list[Message] = []

        async def listen() -> None:
            while True:
                arrived.extend(numbers(await wire.hub.receive()))

        def is_complete() -> bool:
            while (order := link.receive(0.0)) is not None:
                orders.append(order)
            return len(arrived) == len(orders) == 20

        listening = asyncio.create_task(listen())
        for number in range(20):
            if number == 10:
                cable.spoil(is_towards_hub=is_towards_hub)
            link.send(load(number))
            with contextlib.suppress(PeerGone):
                wire.hub.send("engine-0", StageWeights(version=number, buffer="", digest=""))
            await asyncio.sleep(0.01)
        await until(is_complete, what="what the changed byte lost did not come again")
        listening.cancel()
        assert arrived == list(range(20))
        assert [order.version for order in orders if isinstance(order, StageWeights)] == list(range(20))
        cable.close()

    on_zmq(program)


def test_a_peer_that_stands_still_costs_its_bound_and_holds_up_nobody(on_wire: Callable[[Program], None], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session, "LIMIT_BYTES", 1_000_000)
    monkeypatch.setattr(session, "WINDOW_BYTES", 300_000)

    async def program(wire: Wire) -> None:
        standing, good = await connected(wire, 0, 1)
        for number in range(19):  # with their headers, 20 times 50 kB are more than a megabyte
            wire.hub.send("engine-0", Stop(reason=f"{number:050000d}"))
        with pytest.raises(PeerFull, match=r"engine-0 has not taken the last \d+ bytes"):
            wire.hub.send("engine-0", Stop(reason=f"{19:050000d}"))
        wire.hub.send("engine-1", Stop(reason="x"))
        assert await payload(good) == Stop(reason="x")
        receiving = asyncio.create_task(wire.hub.receive())
        orders = [await payload(standing) for _ in range(19)]
        assert [int(order.reason[-6:]) for order in orders if isinstance(order, Stop)] == list(range(19)), "nothing was dropped"
        receiving.cancel()

    on_wire(program)


def test_an_orchestrator_that_takes_nothing_makes_its_peers_wait_within_their_bound(
    on_wire: Callable[[Program], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(session, "LIMIT_BYTES", 100_000)
    monkeypatch.setattr(session, "WINDOW_BYTES", 30_000)

    async def program(wire: Wire) -> None:
        link, sent = wire.link(0), 400
        for number in range(sent):
            link.send(load(number))
        with pytest.raises(PeerFull, match="the orchestrator has not taken"):
            send_for_ever(link)
        arrived: list[int] = []

        async def listen() -> None:
            while len(arrived) < sent:
                arrived.extend(numbers(await wire.hub.receive()))

        listening = asyncio.create_task(listen())
        await until(lambda: link.receive(0.0) is None and listening.done(), what="the rest did not come as credit came back")
        assert arrived[:sent] == list(range(sent))

    on_wire(program)


def test_a_peer_without_a_connection_is_gone_after_a_while_and_not_before(
    on_zmq: Callable[[Program], None], monkeypatch: pytest.MonkeyPatch
):
    """Killed, it says no goodbye; the connection may only be broken, so for some seconds what it is sent is kept."""
    monkeypatch.setattr(router, "LOST_FOR_S", 0.5)

    async def program(wire: ZmqWire) -> None:
        (link,) = await connected(wire, 0)
        assert isinstance(link, zmq_transport.ZmqLink)
        link._socket.close(linger=0)
        started = asyncio.get_running_loop().time()
        with pytest.raises(PeerGone, match=r"cannot send Stop to engine-0: its connection is closed since"):
            await send_until_refused(wire.hub, "engine-0")
        assert asyncio.get_running_loop().time() - started >= 0.5
        link._context.term()

    on_zmq(program)


def test_a_link_hears_signs_of_life_from_an_orchestrator_that_has_nothing_to_say(
    on_zmq: Callable[[Program], None], monkeypatch: pytest.MonkeyPatch
):
    """What it says itself is acknowledged."""
    monkeypatch.setattr(zmq_transport, "PROBE_EVERY_S", 0.1)

    async def program(wire: ZmqWire) -> None:
        (link,) = await connected(wire, 0)

        async def listen() -> None:
            while True:
                await wire.hub.receive()

        async def say(number: int) -> None:
            """And wait for a sign that came after it."""
            said_at = time.monotonic()
            link.send(load(number))
            heard = "what a link said was not acknowledged"
            await until(lambda: link.receive(0.0) is None and time.monotonic() - link.silent_s > said_at, what=heard)

        listening = asyncio.create_task(listen())
        for number in range(6):
            await say(number)
        listening.cancel()
        await until(lambda: link.receive(0.0) is None and link.silent_s >= 1.0, what="an orchestrator that takes nothing is not silent")

    on_zmq(program)


def test_a_link_is_woken_by_another_thread(on_zmq: Callable[[Program], None]):
    async def program(wire: ZmqWire) -> None:
        (link,) = await connected(wire, 0)
        loop = asyncio.get_running_loop()
        for delay_s in (0.0, 0.1):
            threading.Timer(delay_s, link.wake).start()
            started = loop.time()
            assert await loop.run_in_executor(None, link.receive, PATIENCE_S) is None
            assert loop.time() - started < PATIENCE_S / 2
        wire.hub.send("engine-0", Stop(reason="x"))
        assert await loop.run_in_executor(None, link.receive, PATIENCE_S) == Stop(reason="x")

    on_zmq(program)


def test_a_descriptor_tells_of_every_message(on_zmq: Callable[[Program], None]):
    """For who waits for more than the link: drained until None after each signal, it misses nothing."""

    async def program(wire: ZmqWire) -> None:
        (link,) = await connected(wire, 0)
        loop, got = asyncio.get_running_loop(), []
        done = asyncio.Event()

        def drain() -> None:
            while (message := link.receive(0.0)) is not None:
                got.append(message)
            if len(got) == 200:
                done.set()

        loop.add_reader(link.fileno(), drain)
        drain()
        for number in range(200):
            wire.hub.send("engine-0", StageWeights(version=number, buffer="", digest=""))
            await asyncio.sleep(0.001 * (number % 3))
        await asyncio.wait_for(done.wait(), PATIENCE_S)
        loop.remove_reader(link.fileno())
        assert [message.version for message in got] == list(range(200))

    on_zmq(program)


def test_a_new_hub_of_the_same_run_is_another_port_published_after_it_was_bound(tmp_path: Path):
    """Bind first, then publish: whoever reads the endpoint finds somebody listening."""

    async def program(wire: ZmqWire) -> None:
        first = wire.hub.address
        wire.hub.close()
        wire.hub = ZmqHub(tmp_path, "engine", accepts=FromEngine)
        assert wire.hub.address != first
        (link,) = await connected(wire, 0)
        wire.hub.send("engine-0", Stop(reason="x"))
        assert await payload(link) == Stop(reason="x")
        await until(lambda: not list((tmp_path / "endpoints").glob("*.draft")), what="a draft was left")

    run(ZmqWire, tmp_path, program)


def test_a_link_finds_the_orchestrator_that_takes_a_dead_ones_place_and_introduces_itself_first(
    on_zmq: Callable[[Program], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(zmq_transport, "SILENT_S", 0.2)
    monkeypatch.setattr(zmq_transport, "PROBE_EVERY_S", 0.1)

    async def program(wire: ZmqWire) -> None:
        link, kept = wire.link(0), list[int]()

        def introduce(bodies: Sequence[bytes]) -> list[Message]:
            kept.append(len(bodies))
            return [load(1000 + len(kept))]

        link.introduce(introduce)
        assert numbers(await arrivals(wire.hub, 1)) == [1001]
        wire.hub.send("engine-0", Stop(reason="met"))
        await payload(link)
        wire.hub._router._sessions.clear()  # killed: it says no goodbye
        wire.hub.close()
        link.send(load(1))
        wire.hub = ZmqHub(wire.folder, "engine", accepts=FromEngine)
        arriving = asyncio.create_task(arrivals(wire.hub, 1))
        await until(lambda: link.receive(0.0) is None and arriving.done(), what="the link did not find the other address")
        assert numbers(arriving.result()) == [1002]
        assert kept == [0, 1], "what the dead one never took is the introduction's to tell"
        link.send(load(2))
        assert numbers(await arrivals(wire.hub, 1)) == [2]

    on_zmq(program)


def test_the_twins_hub_hands_over_from_a_dead_peer_to_its_successor(tmp_path: Path):
    async def program(wire: MemoryWire) -> None:
        (old,) = await connected(wire, 0)
        wire.hub.send("engine-0", Stop(reason="for the old one"))
        new = wire.link(0)
        wire.hub.send("engine-0", Stop(reason="for the new one"))
        assert await payload(new) == Stop(reason="for the new one")
        old.send(load(1))
        new.send(load(2))
        assert await arrivals(wire.hub, 1) == [("engine-0", load(2))]

    run(MemoryWire, tmp_path, program)
