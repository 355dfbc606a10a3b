"""Simulated time: waiting costs nothing, everything keeps its order, and a deadlock is an error instead of a hang."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.sim.clock import Deadlock, later, simulate


def test_a_year_passes_at_once_and_in_order():
    async def program() -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []
        loop = asyncio.get_running_loop()

        async def wait(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, loop.time()))

        async with asyncio.TaskGroup() as group:
            for name, seconds in (("year", 3.2e7), ("minute", 60.0), ("day", 86400.0)):
                group.create_task(wait(name, seconds))
        return seen

    started = time.monotonic()
    assert simulate(program()) == [("minute", 60.0), ("day", 86400.0), ("year", 3.2e7)]
    assert time.monotonic() - started < 10.0


def test_everybody_waiting_for_everybody_is_found_out():
    async def program() -> None:
        await asyncio.sleep(5.0)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match=r"at 5.000 s everybody waits and no timer is set"):
        simulate(program())


def test_a_deadline_is_kept_on_simulated_time():
    async def program() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.get_running_loop().create_future(), 7.0)
        return asyncio.get_running_loop().time()

    assert simulate(program()) == pytest.approx(7.0)


def test_work_for_a_thread_is_done_in_place():
    async def program() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, lambda number: number + 1, 4), loop.time()

    assert simulate(program()) == (5, 0.0)


def test_later_ends_after_its_seconds_well_or_with_its_error():
    async def program() -> None:
        good, bad = later(2.0), later(3.0, ValueError("no"))
        await asyncio.sleep(1.9)
        assert not good.done()
        await asyncio.sleep(0.2)
        assert good.result() is None
        assert not bad.done()
        await asyncio.sleep(1.0)
        assert isinstance(bad.exception(), ValueError)

    simulate(program())
