"""Peers: who is missing, who failed and who fell silent is always named; on simulated time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from orchestrator.peers.peers import Peers
from orchestrator.rules.validation.penalties import MAX_REPLACED
from pipelinerl.errors import PeerRefused, PeerSilent
from pipelinerl.messages import EngineLoad, Failed, FromEngine, Message, Starting, Stop, ToEngine
from pipelinerl.transport.router import LOST_FOR_S
from tests.sim.clock import simulate
from tests.sim.memory import MemoryHub


def load(engine_id: int = 0, *, num_tokens: int = 0) -> EngineLoad:
    return EngineLoad(
        engine_id=engine_id, version=0, num_running=0, num_waiting=0, num_tokens=num_tokens, num_steps=0, busy_s=0.0, idle_s=0.0
    )


def engines(hub: MemoryHub, *, expected: int = 2) -> Peers:
    return Peers(hub, role="engine", expected=expected, ready_deadline_s=30.0, silent_after_s=8.0)


@contextlib.asynccontextmanager
async def running(peers: Peers) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(peers.run())
        yield
        task.cancel()


def test_messages_reach_the_handler_of_their_type_in_order_with_the_peers_name():
    async def program() -> list[tuple[str, int]]:
        hub = MemoryHub(accepts=FromEngine)
        links = [hub.connect(f"engine-{number}", accepts=ToEngine) for number in range(2)]
        peers, heard = engines(hub), []
        peers.on(EngineLoad, lambda peer, message: heard.append((peer, message.num_tokens)))
        async with running(peers):
            for number, engine_id in [(1, 0), (2, 1), (3, 0)]:
                links[engine_id].send(load(engine_id, num_tokens=number))
            await asyncio.sleep(0.1)
        return heard

    assert simulate(program()) == [("engine-0", 1), ("engine-1", 2), ("engine-0", 3)]


def test_who_did_not_start_is_named():
    async def program() -> None:
        hub = MemoryHub(accepts=FromEngine)
        peers = engines(hub, expected=4)
        peers.on(EngineLoad, lambda peer, message: None)
        hub.connect("engine-0", accepts=ToEngine).send(load())
        hub.connect("engine-2", accepts=ToEngine).send(load(2))
        await peers.run()

    with pytest.RaisesGroup(pytest.RaisesExc(PeerSilent, match="waited 30 s for engine-1, engine-3 to start")):
        simulate(program())


def test_a_peer_that_falls_silent_is_named_with_the_seconds():
    async def program() -> None:
        hub = MemoryHub(accepts=FromEngine)
        links = [hub.connect(f"engine-{number}", accepts=ToEngine) for number in range(2)]
        peers = engines(hub)
        peers.on(EngineLoad, lambda peer, message: None)
        async with running(peers):
            for second in range(100):
                links[0].send(load())
                if second < 5:  # last heard at 4 s; 8 s are allowed, and every 2 s somebody looks: 14 s
                    links[1].send(load(1))
                assert second < 16, "nobody noticed"
                await asyncio.sleep(1.0)

    expected = pytest.RaisesExc(PeerSilent, match="engine-1 was last heard 10 s ago; the limit is 8 s")
    with pytest.RaisesGroup(expected, flatten_subgroups=True):
        simulate(program())


def test_a_silent_peer_is_fenced_and_replaced_once_and_ends_the_run_only_where_nobody_takes_its_place():
    async def program() -> None:
        hub = MemoryHub(accepts=FromEngine)
        link = hub.connect("engine-0", accepts=ToEngine)
        peers = Peers(hub, role="engine", expected=1, ready_deadline_s=30.0, silent_after_s=8.0, replace=replaced.append)
        peers.on(EngineLoad, lambda peer, message: None)
        async with running(peers):
            peers.on(Starting, lambda peer, message: None)
            link.send(Starting(process_id=17))
            link.send(load())
            await asyncio.sleep(11.0)
            assert replaced == ["engine-0"]
            assert not peers.is_reachable("engine-0")
            link.send(load())
            await asyncio.sleep(0.1)
            assert peers.is_reachable("engine-0"), "it was only slow"
            await asyncio.sleep(30.0)
            assert replaced == ["engine-0"] * 2
            await asyncio.sleep(12.0)

    replaced: list[str] = []
    expected = pytest.RaisesExc(
        PeerSilent, match="engine-0 was last heard 39 s ago; the limit is 8 s, and nobody took its place in the 30 s"
    )
    with pytest.RaisesGroup(expected, flatten_subgroups=True):
        simulate(program())


def test_a_peer_that_is_heard_of_now_and_then_is_not_silent():
    async def program() -> float:
        hub = MemoryHub(accepts=FromEngine)
        link = hub.connect("engine-0", accepts=ToEngine)
        peers = engines(hub, expected=1)
        peers.on(EngineLoad, lambda peer, message: None)
        async with running(peers):
            for _ in range(20):
                link.send(load())
                await asyncio.sleep(7.5)
        return asyncio.get_running_loop().time()

    assert simulate(program()) == pytest.approx(150.0)


def test_once_the_run_ends_everyone_is_told_also_who_is_being_replaced_and_silence_is_no_fault():
    async def program() -> list[object]:
        hub = MemoryHub(accepts=FromEngine)
        links = [hub.connect(f"engine-{number}", accepts=ToEngine) for number in range(3)]
        peers = engines(hub, expected=3)
        peers.on(EngineLoad, lambda peer, message: None)
        async with running(peers):
            for number, link in enumerate(links):
                link.send(load(number))
            await asyncio.sleep(0.1)
            links[1].close()
            peers.send("engine-1", Stop(reason="nobody hears this"))
            await asyncio.sleep(LOST_FOR_S + 0.9)
            peers.dismiss(Stop(reason="finished"))
            await asyncio.sleep(60.0)
            links[1] = hub.connect("engine-1", accepts=ToEngine)
        return [link.receive(0) for link in links]

    assert simulate(program()) == [Stop(reason="finished")] * 3


def test_a_peers_last_words_end_the_run_where_it_cannot_go_on_without_that_process():
    async def program() -> None:
        hub = MemoryHub(accepts=FromEngine)
        hub.connect("engine-1", accepts=ToEngine).send(Failed(error="EngineError: out of memory"))
        await Peers(hub, role="engine", expected=2, ready_deadline_s=30.0, silent_after_s=8.0, failure_ends_run=True).run()

    with pytest.RaisesGroup(pytest.RaisesExc(PeerRefused, match="^engine-1 failed: EngineError: out of memory$")):
        simulate(program())


FAILED = Failed(error="EngineError: out of memory")


async def _talking(hub: MemoryHub, peers: Peers, *, saying: dict[int, Message], for_s: int, who: int = 1) -> None:
    """Engines 0 and 1 are heard every second, `who` also with what it is `saying` at some of them."""
    links = [hub.connect(f"engine-{number}", accepts=ToEngine) for number in range(2)]
    async with running(peers):
        for second in range(for_s):
            for number, link in enumerate(links):
                link.send(load(number))
            if second in saying:
                links[who].send(saying[second])
            await asyncio.sleep(1.0)


def test_whoever_says_that_an_engine_failed_costs_its_process_and_no_run():
    """It goes on talking, as its true process does where another one has its key; replaced as often as for violations, and then no more."""
    replaced: list[str] = []
    rejected: list[tuple[str, bool]] = []

    async def program() -> None:
        hub = MemoryHub(accepts=FromEngine)
        peers = Peers(hub, role="engine", expected=2, ready_deadline_s=300.0, silent_after_s=8.0, replace=replaced.append, has_spares=True)
        peers.on(EngineLoad, lambda peer, message: None)
        peers.on_rejected(lambda peer, is_final: rejected.append((peer, is_final)))
        saying: dict[int, Message] = {}
        for life in range(5):
            saying |= {20 * life + 1: FAILED, 20 * life + 3: FAILED, 20 * life + 19: Starting(process_id=life)}
        await _talking(hub, peers, saying=saying, for_s=100)

    simulate(program())
    assert replaced == ["engine-1"] * MAX_REPLACED
    assert rejected == [("engine-1", False)] * 5, "it gets no work until another process has its name"


def test_a_process_that_has_failed_may_end_by_itself_before_it_is_replaced_and_is_sent_nothing_meanwhile():
    replaced: list[str] = []

    async def program() -> tuple[int, bool, int, bool]:
        hub = MemoryHub(accepts=FromEngine)
        peers = Peers(hub, role="engine", expected=2, ready_deadline_s=300.0, silent_after_s=8.0, replace=replaced.append)
        peers.on(EngineLoad, lambda peer, message: None)
        await _talking(hub, peers, saying={1: FAILED}, for_s=7)
        before = len(replaced), peers.is_reachable("engine-1")
        await _talking(hub, peers, saying={9: Starting(process_id=7)}, for_s=11)
        return *before, len(replaced), peers.is_reachable("engine-1")

    assert simulate(program()) == (0, False, 1, True)


def test_a_failure_that_nobody_can_mend_is_not_believed_of_a_peer_that_the_run_needs_and_told_when_it_falls_silent():
    told: list[str] = []

    async def program() -> None:
        hub = MemoryHub(accepts=FromEngine)
        peers = engines(hub)
        peers.on(EngineLoad, lambda peer, message: None)
        peers.on_rejected(lambda peer, is_final: told.append(peer))
        await _talking(hub, peers, saying={1: FAILED}, for_s=60, who=0)
        assert not told, "it is heard: nothing is taken from it"
        await peers.run()

    with pytest.RaisesGroup(pytest.RaisesExc(PeerSilent, match="engine-0 was last heard .* Its last words: EngineError: out of memory")):
        simulate(program())
