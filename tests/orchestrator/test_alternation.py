"""Who is told to sleep and who is woken, where engines and trainer share their devices."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pipelinerl.messages import Asleep, Message, Sleep, StageWeights
from tests.orchestrator.test_weight_sync import Bench, bench, received
from tests.sim.clock import simulate


async def fall_asleep(it: Bench, engine_id: int, told: Message) -> None:
    assert isinstance(told, Sleep)
    it.engines[engine_id].send(Asleep(engine_id=engine_id, phase_id=told.phase_id, sleep_s=0.1, num_bytes=1, num_running=3))
    await asyncio.sleep(0.01)


def test_an_engine_is_settled_for_an_evaluation_only_once_it_has_slept_and_is_awake_again(tmp_path: Path):
    num_closed = 0

    async def program() -> None:
        nonlocal num_closed
        async with bench(tmp_path, num_closed=lambda: num_closed) as it:
            sync, alternation = it.weight_sync, it.weight_sync.alternation
            for engine_id in range(2):
                (told,) = received(it.engines[engine_id])
                await fall_asleep(it, engine_id, told)
            assert alternation.may_train, "nobody has published, and all sleep"
            await it.publish(0)
            assert [it.ordered(engine_id) for engine_id in range(2)] == [[0], [0]], "also of the version that they had"
            for engine_id in range(2):
                await it.commit(engine_id, 0)
            assert sync.is_settled(it.known[0])
            num_closed = 1
            alternation.update()
            sync.pin(it.known[0], is_pinned=True)
            assert not sync.is_settled(it.known[0]), "it was told to sleep already"
            tolds = [received(link) for link in it.engines]
            for engine_id, (told,) in enumerate(tolds):
                await fall_asleep(it, engine_id, told)
            assert not sync.is_settled(it.known[0])
            await it.publish(1)
            orders = [message for message in received(it.engines[0]) if isinstance(message, StageWeights)]
            assert [order.version for order in orders] == [1], "it keeps what wakes it"
            await it.commit(0, 1)
            assert sync.is_settled(it.known[0])
            num_closed = 2
            alternation.update()
            assert alternation.may_order(0), "an evaluation goes on"
            sync.pin(it.known[0], is_pinned=False)
            assert not alternation.may_order(0)
            assert [type(message) for message in received(it.engines[0])] == [Sleep]

    simulate(program())


def test_an_answer_to_an_earlier_phase_puts_nobody_to_sleep(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path, num_closed=lambda: 1) as it:
            (told,) = received(it.engines[0])
            assert isinstance(told, Sleep)
            it.engines[0].send(Asleep(engine_id=0, phase_id=told.phase_id - 1, sleep_s=0.1, num_bytes=1, num_running=3))
            await fall_asleep(it, 1, told)
            assert not it.weight_sync.alternation.may_train
            await fall_asleep(it, 0, told)
            assert it.weight_sync.alternation.may_train

    simulate(program())


def test_an_engine_apart_takes_new_work_and_policies_while_the_other_sleeps(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path, num_closed=lambda: 2, num_apart=1) as it:
            (told,) = received(it.engines[0])
            assert received(it.engines[1]) == []
            assert it.known.least_busy(lambda version: True) == 1
            assert not it.known.all_hold(0), "a round waits until the other is awake"
            await fall_asleep(it, 0, told)
            await it.publish(1, copy="copy-1")
            assert it.ordered(0) == []
            (order,) = received(it.engines[1])
            assert isinstance(order, StageWeights)
            assert (order.version, order.buffer) == (1, "copy-1")
            await it.publish(2, copy="copy-2")
            (order,) = received(it.engines[0])
            assert isinstance(order, StageWeights)
            assert (order.version, order.buffer) == (2, "in place")
            assert it.known.least_busy(lambda version: True) == 1, "until it is awake"
            await it.commit(0, 2)
            await it.commit(1, 2)
            assert it.known.least_busy(lambda version: True) == 0
            assert it.known.all_hold(2)

    simulate(program())


def test_an_engine_that_is_told_of_a_policy_is_awaited_though_it_has_not_taken_it_yet(tmp_path: Path):
    """A step may be closed while the order is under way: the engine then wakes in the trainer's phase, and sleeps again."""
    num_closed = 0

    async def program() -> None:
        nonlocal num_closed
        async with bench(tmp_path, num_closed=lambda: num_closed) as it:
            alternation = it.weight_sync.alternation
            for engine_id in range(2):
                (told,) = received(it.engines[engine_id])
                await fall_asleep(it, engine_id, told)
            await it.publish(0)
            num_closed = 1
            alternation.update()
            assert not alternation.may_train
            for engine_id in range(2):
                order, told = received(it.engines[engine_id])
                assert isinstance(order, StageWeights)
                await it.commit(engine_id, 0)
                assert not alternation.may_train
                await fall_asleep(it, engine_id, told)
            assert alternation.may_train

    simulate(program())
