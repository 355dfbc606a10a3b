"""Channels are bounded, drop nothing and end by closing; a signal wakes everyone; on simulated time."""

from __future__ import annotations

import asyncio

import pytest

from pipelinerl.runtime.stage import Channel, Signal
from pipelinerl.runtime.watch import Watch
from tests.sim.clock import simulate


def channel(bound_bytes: int = 10) -> Channel[int]:
    """A channel of integers whose size is their value."""
    return Channel(
        "numbers", giver="source", taker="sink", watch=Watch(stall_limit_s=100.0), bound_bytes=bound_bytes, size=lambda item: item
    )


async def settled() -> None:
    """Let everything that can go on now go on."""
    await asyncio.sleep(0.001)


def test_items_come_out_in_order_and_the_channel_counts_them():
    async def program() -> None:
        numbers = channel()
        for number in (3, 1, 2):
            await numbers.put(number)
        assert (len(numbers), numbers.num_bytes) == (3, 6)
        assert [await numbers.get() for _ in range(3)] == [3, 1, 2]
        assert (len(numbers), numbers.num_bytes, numbers.num_items_ever) == (0, 0, 3)

    simulate(program())


def test_a_full_channel_makes_its_producer_wait_until_there_is_room():
    async def program() -> None:
        numbers = channel(bound_bytes=10)
        await numbers.put(6)
        await numbers.put(4)
        putting = asyncio.create_task(numbers.put(5))
        await settled()
        assert not putting.done()
        assert numbers.get_now() == 6
        await putting
        assert numbers.num_bytes == 9

    simulate(program())


def test_bytes_stay_within_the_bound_for_many_producers():
    async def program() -> None:
        numbers = channel(bound_bytes=10)
        most = 0

        async def produce(start: int) -> None:
            for number in range(40):
                await numbers.put(1 + (start + number) % 5)

        async def consume() -> int:
            nonlocal most
            total = 0
            for _ in range(120):
                most = max(most, numbers.num_bytes)
                total += await numbers.get() or 0
                await asyncio.sleep(0.01)
            return total

        async with asyncio.TaskGroup() as group:
            for start in range(3):
                group.create_task(produce(start))
            consuming = group.create_task(consume())
        assert consuming.result() == 3 * 40 * 3, "the mean of 1..5 is 3: nothing was lost or doubled"
        assert 8 <= most <= 10

    simulate(program())


def test_an_item_larger_than_the_bound_passes_through_an_empty_channel():
    async def program() -> None:
        numbers = channel(bound_bytes=10)
        await numbers.put(1)
        putting = asyncio.create_task(numbers.put(99))
        await settled()
        assert not putting.done(), "not beside another item"
        assert await numbers.get() == 1
        await putting
        assert await numbers.get() == 99

    simulate(program())


def test_room_that_is_claimed_is_nobody_elses_until_its_item_has_come_and_gone():
    async def program() -> None:
        numbers = channel(bound_bytes=10)
        await numbers.claim(4)
        await numbers.claim(6)
        third, other = asyncio.create_task(numbers.claim(1)), asyncio.create_task(numbers.put(1))
        await settled()
        assert (third.done(), other.done(), numbers.num_bytes, numbers.claimed_bytes) == (False, False, 0, 10)
        numbers.put_claimed(6)
        await settled()
        assert (third.done(), other.done(), numbers.num_bytes, numbers.claimed_bytes) == (False, False, 6, 4)
        assert numbers.get_now() == 6
        await third
        numbers.put_claimed(4)
        numbers.put_claimed(1)
        assert [await numbers.get(), await numbers.get(), numbers.claimed_bytes] == [4, 1, 0]
        await other

    simulate(program())


def test_an_item_larger_than_the_bound_is_claimed_by_itself():
    async def program() -> None:
        numbers = channel(bound_bytes=10)
        await numbers.claim(99)
        second = asyncio.create_task(numbers.claim(1))
        numbers.put_claimed(99)
        await settled()
        assert not second.done()
        assert await numbers.get() == 99
        await second
        third = asyncio.create_task(numbers.claim(99))
        await settled()
        assert not third.done(), "not beside another one"

    simulate(program())


def test_a_claim_waits_in_the_name_of_who_gives_and_more_than_was_claimed_is_our_own_mistake():
    async def program() -> None:
        numbers = channel(bound_bytes=10)
        await numbers.claim(10)
        waiting = asyncio.create_task(numbers.claim(1))
        await settled()
        assert [(wait.stage, wait.what) for wait in numbers._watch.waits()] == [("source", "room in numbers")]
        with pytest.raises(AssertionError, match="numbers: more was put than was claimed"):
            numbers.put_claimed(11)
        waiting.cancel()

    simulate(program())


def test_a_channel_is_full_at_its_bound_and_never_while_it_is_empty():
    numbers = channel(bound_bytes=10)
    for added, is_full in ((9, False), (1, True), (1, True)):
        numbers.put_now(added)
        assert numbers.is_full is is_full
    while numbers.get_now() is not None:
        pass
    assert not numbers.is_full


def test_a_closed_channel_gives_what_is_left_and_then_ends():
    async def program() -> None:
        numbers = channel()
        await numbers.put(1)
        await numbers.put(2)
        numbers.close()
        numbers.close()
        assert [number async for number in numbers] == [1, 2]
        assert await numbers.get() is None

    simulate(program())


def test_closing_wakes_every_waiting_reader():
    async def program() -> None:
        numbers = channel()
        readers = [asyncio.create_task(numbers.get()) for _ in range(3)]
        await settled()
        numbers.close()
        assert await asyncio.gather(*readers) == [None, None, None]

    simulate(program())


def test_putting_into_a_closed_channel_is_our_own_mistake():
    async def program() -> None:
        numbers = channel()
        numbers.close()
        with pytest.raises(RuntimeError, match="numbers is closed; source must not put"):
            await numbers.put(1)

    simulate(program())


def test_a_reader_cancelled_just_after_it_was_woken_hands_the_item_to_the_next():
    async def program() -> None:
        numbers = channel()
        first, second = (asyncio.create_task(numbers.get()) for _ in range(2))
        await settled()
        numbers.put_now(7)  # wakes the first,
        first.cancel()  # which never gets to take it
        assert await asyncio.wait_for(second, 1.0) == 7
        assert first.cancelled() or (await asyncio.gather(first, return_exceptions=True))

    simulate(program())


def test_a_producer_cancelled_just_after_it_was_woken_hands_the_room_to_the_next():
    async def program() -> None:
        numbers = channel(bound_bytes=10)
        await numbers.put(10)
        first, second = asyncio.create_task(numbers.put(8)), asyncio.create_task(numbers.put(9))
        await settled()
        assert await numbers.get() == 10
        first.cancel()
        await asyncio.wait_for(second, 1.0)
        assert list(numbers._items) == [9]

    simulate(program())


def test_a_cancelled_reader_leaves_the_others_waiting():
    async def program() -> None:
        numbers = channel()
        first, second = (asyncio.create_task(numbers.get()) for _ in range(2))
        await settled()
        first.cancel()
        await settled()
        assert not second.done()
        await numbers.put(7)
        assert await asyncio.wait_for(second, 1.0) == 7

    simulate(program())


def test_a_wait_is_known_to_the_watch_by_stage_and_channel_and_its_seconds_are_summed():
    async def program() -> None:
        numbers = channel(bound_bytes=10)
        watch = numbers._watch
        reading = asyncio.create_task(numbers.get())
        await asyncio.sleep(2.0)
        assert [(wait.stage, wait.what, wait.since) for wait in watch.waits()] == [("sink", "numbers", 0.0)]
        await numbers.put(10)
        await reading
        await numbers.put(10)
        writing = asyncio.create_task(numbers.put(10))
        await asyncio.sleep(3.0)
        assert [(wait.stage, wait.what, wait.since) for wait in watch.waits()] == [("source", "room in numbers", 2.0)]
        assert watch.all_waited_s() == pytest.approx({"sink: numbers": 2.0, "source: room in numbers": 3.0})
        numbers.get_now()
        await writing
        assert watch.waits() == []
        assert watch.waited_s == pytest.approx({"sink: numbers": 2.0, "source: room in numbers": 3.0})

    simulate(program())


def test_a_signal_wakes_everyone_who_waits_and_nobody_who_comes_later():
    async def program() -> None:
        signal = Signal()
        waiting = [asyncio.create_task(signal.wait()) for _ in range(3)]
        await settled()
        signal.set()
        await asyncio.wait_for(asyncio.gather(*waiting), 1.0)
        late = asyncio.create_task(signal.wait())
        await settled()
        assert not late.done()
        late.cancel()

    simulate(program())


def test_a_cancelled_waiter_wakes_no_other():
    """A spurious wake-up would let a waiter run without anything having changed."""

    async def program() -> None:
        signal = Signal()
        first, second = (asyncio.create_task(signal.wait()) for _ in range(2))
        await settled()
        second.cancel()
        await settled()
        assert not first.done()
        signal.set()
        await asyncio.wait_for(first, 1.0)

    simulate(program())
