"""The network of the in-process transport: late, lost, doubled, out of order, and every time the same."""

from __future__ import annotations

import asyncio

import pytest

from pipelinerl.messages import FromEngine, Stop, ToEngine
from tests.sim.clock import simulate
from tests.sim.memory import FaultyNetwork, MemoryHub, NetworkFaults


def journey(faults: NetworkFaults, *, count: int = 200) -> list[tuple[float, int]]:
    """Send frames every 10 ms; when each arrived and which it was."""

    async def program() -> list[tuple[float, int]]:
        network, loop = FaultyNetwork(faults), asyncio.get_running_loop()
        arrived: list[tuple[float, int]] = []
        for number in range(count):
            network.carry("engine-0>hub", str(number).encode(), lambda frame: arrived.append((loop.time(), int(frame))))
            await asyncio.sleep(0.01)
        await asyncio.sleep(10.0)
        return arrived

    return simulate(program())


def test_in_calm_weather_everything_arrives_at_once():
    arrived = journey(NetworkFaults())
    assert [number for _, number in arrived] == list(range(200))
    assert all(at == pytest.approx(0.01 * number, abs=1e-6) for at, number in arrived)


def test_delays_keep_the_order_unless_the_weather_reorders():
    calm_order = journey(NetworkFaults(delay_s=0.1, jitter_s=0.5))
    assert [number for _, number in calm_order] == list(range(200))
    assert all(0.1 <= at - 0.01 * number <= 0.6001 for at, number in calm_order)
    reordered = [number for _, number in journey(NetworkFaults(delay_s=0.1, jitter_s=0.5, reorders=True))]
    assert reordered != sorted(reordered)
    assert sorted(reordered) == list(range(200))


def test_frames_are_lost_and_doubled_in_their_fractions():
    lost = [number for _, number in journey(NetworkFaults(drop_fraction=0.25), count=1000)]
    assert len(lost) == pytest.approx(750, abs=50)
    assert len(set(lost)) == len(lost)
    doubled = [number for _, number in journey(NetworkFaults(repeat_fraction=0.25), count=1000)]
    assert len(doubled) == pytest.approx(1250, abs=50)
    assert set(doubled) == set(range(1000))


def test_one_seed_is_one_weather():
    network = NetworkFaults(jitter_s=0.5, drop_fraction=0.1, seed=7)
    assert journey(network) == journey(network)
    assert journey(network) != journey(NetworkFaults(jitter_s=0.5, drop_fraction=0.1, seed=8))


def test_the_way_back_has_weather_too():
    async def program() -> float:
        hub = MemoryHub(accepts=FromEngine, network=NetworkFaults(delay_s=2.0))
        link = hub.connect("engine-0", accepts=ToEngine)
        hub.send("engine-0", Stop(reason="finished"))
        assert link.receive(0) is None
        assert await link.wait() == Stop(reason="finished")
        return asyncio.get_running_loop().time()

    assert simulate(program()) == pytest.approx(2.0)


def test_what_arrives_at_a_closed_link_is_lost():
    async def program() -> None:
        hub = MemoryHub(accepts=FromEngine, network=NetworkFaults(delay_s=2.0))
        link = hub.connect("engine-0", accepts=ToEngine)
        hub.send("engine-0", Stop(reason="finished"))
        link.close()
        await asyncio.sleep(3.0)
        assert link.receive(0) is None

    simulate(program())
