"""What every transport promises about messages: whole, in order, once, in both directions; over ZeroMQ and over its in-process twin."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import numpy as np
import pytest

from pipelinerl.errors import PeerGone
from pipelinerl.messages import Completion, EngineLoad, Finish, Generate, Sampling, StageWeights, Stop
from tests.contract.wires import PATIENCE_S, Program, Wire, ZmqWire, arrivals, connected, load, payload, send_until_refused


def test_messages_arrive_whole_and_in_order_in_both_directions(on_wire: Callable[[Program], None]):
    async def program(wire: Wire) -> None:
        (link,) = await connected(wire, 0)
        for number in range(500):
            link.send(load(number))
            wire.hub.send("engine-0", StageWeights(version=number, buffer="s" * number, digest=""))
        assert [message.num_tokens for _, message in await arrivals(wire.hub, 500) if isinstance(message, EngineLoad)] == list(range(500))
        orders = [await payload(link) for _ in range(500)]
        assert [(order.version, len(order.buffer)) for order in orders if isinstance(order, StageWeights)] == [(n, n) for n in range(500)]

    on_wire(program)


def test_several_peers_are_told_apart_and_each_keeps_its_order(on_wire: Callable[[Program], None]):
    async def program(wire: Wire) -> None:
        links = await connected(wire, 0, 1, 2)
        for number in range(100):
            for link in links:
                link.send(load(number))
            wire.hub.send(f"engine-{number % 3}", StageWeights(version=number, buffer="", digest=""))
        arrived = await arrivals(wire.hub, 300)
        for name in ("engine-0", "engine-1", "engine-2"):
            assert [message.num_tokens for peer, message in arrived if peer == name and isinstance(message, EngineLoad)] == list(range(100))
        assert [order.version for order in [await payload(links[1]) for _ in range(33)] if isinstance(order, StageWeights)] == list(
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
        request = await payload(link)
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


@pytest.mark.slow
def test_sending_to_somebody_who_has_left_raises_and_the_others_are_unharmed(on_wire: Callable[[Program], None]):
    async def program(wire: Wire) -> None:
        first, second = await connected(wire, 0, 1)
        first.close()
        with pytest.raises(PeerGone, match="engine-0"):
            await send_until_refused(wire.hub, "engine-0")
        wire.hub.send("engine-1", Stop(reason="finished"))
        assert await payload(second) == Stop(reason="finished")

    on_wire(program)


def test_who_comes_back_under_the_same_name_takes_over(on_wire: Callable[[Program], None]):
    async def program(wire: Wire) -> None:
        (old,) = await connected(wire, 0)
        old.close()
        (new,) = await connected(wire, 0)
        wire.hub.send("engine-0", Stop(reason="hello again"))
        assert await payload(new) == Stop(reason="hello again")
        new.send(load(3))
        assert await arrivals(wire.hub, 1) == [("engine-0", load(3))]

    on_wire(program)


def test_what_was_sent_before_closing_arrives(on_wire: Callable[[Program], None]):
    async def program(wire: Wire) -> None:
        leaving, staying = await connected(wire, 0, 1)
        for number in range(200):
            leaving.send(load(number))
        leaving.close()
        assert [message.num_tokens for _, message in await arrivals(wire.hub, 200) if isinstance(message, EngineLoad)] == list(range(200))
        for number in range(200):
            wire.hub.send("engine-1", StageWeights(version=number, buffer="", digest=""))
        wire.hub.close()
        orders = [await payload(staying) for _ in range(200)]
        assert [order.version for order in orders if isinstance(order, StageWeights)] == list(range(200))

    on_wire(program)


@pytest.mark.slow
def test_the_last_word_reaches_also_who_connects_after_it(on_wire: Callable[[Program], None]):
    async def program(wire: Wire) -> None:
        (there,) = await connected(wire, 0)
        wire.hub.dismiss(Stop(reason="finished"))
        late = wire.link(1)
        if isinstance(wire, ZmqWire):  # in memory nothing is left of a hub that has closed
            wire.hub.close()
        assert [await payload(link) for link in (there, late)] == [Stop(reason="finished")] * 2

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
        assert time.monotonic() - started >= 0.09
        wire.hub.send("engine-0", Stop(reason="x"))
        assert link.receive(PATIENCE_S) == Stop(reason="x")

    on_zmq(program)
