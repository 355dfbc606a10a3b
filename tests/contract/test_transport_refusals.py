"""What is no accepted message costs one counter, by reason, and nothing else; over ZeroMQ and over its in-process twin."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable

import pytest
import zmq

from pipelinerl.errors import WireError
from pipelinerl.messages import Failed, Stop
from pipelinerl.transport import codec, frame
from pipelinerl.transport import zmq as zmq_transport
from pipelinerl.transport.codec import encode
from pipelinerl.transport.frame import HEADER_BYTES, Kind
from pipelinerl.transport.keys import read_keys
from tests.contract.wires import PATIENCE_S, Program, Wire, ZmqWire, arrivals, connected, framed, load, payload, until

NO_MESSAGE = {
    "nothing": b"",
    "noise": b"\xc1\xc1\xc1",
    "a message the orchestrator would send": encode(Stop(reason="no")),
    "half a message": encode(load(1))[:20],
    "a pickle": pickle.dumps({"type": "EngineLoad"}),
    "text": b"GET / HTTP/1.1\r\n\r\n",
}
(GOOD_FRAME,) = framed(encode(load(1)))
NO_FRAME = {
    "nothing": b"",
    "a message without a header": encode(load(1)),
    "half a header": GOOD_FRAME[: HEADER_BYTES - 1],
    "no magic": b"XX" + GOOD_FRAME[2:],
    "an unknown kind": GOOD_FRAME[:3] + b"\x09" + GOOD_FRAME[4:],
    "nobody's": GOOD_FRAME[:8] + bytes(8) + GOOD_FRAME[16:],
    "an acknowledgement of what was never sent": frame.pack(Kind.ACK, sender=7, receiver=0, number=0, acked=1),
    "a pickle": pickle.dumps({"type": "EngineLoad"}),
    "text": b"GET / HTTP/1.1\r\n\r\n" * 5,
}


@pytest.mark.parametrize("name", NO_MESSAGE)
def test_bytes_that_are_no_accepted_message_are_counted_and_dropped(on_wire: Callable[[Program], None], name: str):
    async def program(wire: Wire) -> None:
        (good,) = await connected(wire, 0)
        wire.send_raw("engine-1", *framed(encode(load(1)), NO_MESSAGE[name], NO_MESSAGE[name], encode(load(2))))
        arrived = await arrivals(wire.hub, 2)
        assert arrived == [("engine-1", load(1)), ("engine-1", load(2))], "the good ones of the same peer pass"
        assert wire.hub.refused == {"malformed": 2}
        good.send(load(3))
        assert await arrivals(wire.hub, 1) == [("engine-0", load(3))]

    on_wire(program)


@pytest.mark.parametrize("name", NO_FRAME)
def test_bytes_that_are_no_frame_are_counted_and_dropped(on_wire: Callable[[Program], None], name: str):
    async def program(wire: Wire) -> None:
        (good,) = await connected(wire, 0)
        wire.send_raw("engine-1", NO_FRAME[name], NO_FRAME[name], *framed(encode(load(1))))
        assert await arrivals(wire.hub, 1) == [("engine-1", load(1))]
        assert wire.hub.refused == {"malformed": 2}
        good.send(load(3))
        assert await arrivals(wire.hub, 1) == [("engine-0", load(3))]

    on_wire(program)


def test_a_flood_of_bad_frames_is_counted_one_by_one_while_good_ones_pass(on_wire: Callable[[Program], None]):
    async def program(wire: Wire) -> None:
        (good,) = await connected(wire, 0)
        flood = list(NO_FRAME.values()) * 300
        wire.send_raw("engine-1", *flood)
        for number in range(50):
            good.send(load(number))
            assert await arrivals(wire.hub, 1) == [("engine-0", load(number))]
        while wire.hub.refused["malformed"] < len(flood):
            good.send(load(0))
            await arrivals(wire.hub, 1)
        assert wire.hub.refused == {"malformed": len(flood)}

    on_wire(program)


def test_a_flood_that_nobody_reads_stays_with_its_sender(on_zmq: Callable[[Program], None]):
    """So the orchestrator's memory is bounded, whatever a peer with a key sends that ignores its credit."""

    async def program(wire: ZmqWire) -> None:
        flooding = wire.dealer(b"anything", keys=read_keys(wire.folder, "engine-1"), hwm=1)
        sent = 0
        # What must fit is waited for; that nothing more does shows within a second.
        while sent < 5000 and flooding.poll(1000 if sent >= zmq_transport.MAX_UNREAD else int(1000 * PATIENCE_S), zmq.POLLOUT):
            flooding.send(b"x" * 20_000)
            sent += 1
        assert zmq_transport.MAX_UNREAD <= sent < 5000, "what fits the queue, and the system's buffers"

    on_zmq(program)


def test_a_peer_of_another_schema_is_counted_and_told_what_to_do(on_wire: Callable[[Program], None], monkeypatch: pytest.MonkeyPatch):
    async def program(wire: Wire) -> None:
        await connected(wire, 0)
        link = wire.link(1)
        monkeypatch.setattr(frame, "SCHEMA", frame.SCHEMA ^ 1)
        link.send(load(1))
        monkeypatch.undo()
        receiving = asyncio.create_task(wire.hub.receive())
        await until(lambda: wire.hub.refused == {"schema": 1}, what="another schema was not counted")
        monkeypatch.setattr(frame, "SCHEMA", frame.SCHEMA ^ 1)
        with pytest.raises(WireError, match=r"speaks wire 3 and schema [0-9a-f]{8}, this one .*: install the same version of pipelinerl"):
            await payload(link)
        receiving.cancel()

    on_wire(program)


def test_the_schemas_fingerprint_changes_with_names_fields_and_types():
    class Alive(codec.Message, frozen=True):
        busy_with: str = ""

    class Renamed(codec.Message, frozen=True):
        busy_with: str = ""

    class Retyped(codec.Message, frozen=True):
        busy_with: int = 0

    class Longer(codec.Message, frozen=True):
        busy_with: str = ""
        since: float = 0.0

    fingerprints = {frame.schema_of([cls]) for cls in (Alive, Renamed, Retyped, Longer)}
    assert len(fingerprints) == 4
    assert frame.schema_of([Alive]) in fingerprints


def test_a_message_over_the_limit_is_counted_and_dropped(on_wire: Callable[[Program], None], monkeypatch: pytest.MonkeyPatch):
    async def program(wire: Wire) -> None:
        frames = framed(encode(Failed(error="x" * 100_001)), encode(load(1)))
        monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 100_000)
        wire.send_raw("engine-0", *frames)
        assert await arrivals(wire.hub, 1) == [("engine-0", load(1))]
        assert wire.hub.refused == {"oversize": 1}

    on_wire(program)


def test_a_message_over_the_limit_is_refused_at_its_sender(on_wire: Callable[[Program], None], monkeypatch: pytest.MonkeyPatch):
    async def program(wire: Wire) -> None:
        (link,) = await connected(wire, 0)
        monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 100_000)
        with pytest.raises(WireError, match=r"Failed of 1000\d\d bytes exceeds the limit of 100000 bytes"):
            link.send(Failed(error="x" * 100_001))
        with pytest.raises(WireError, match="Stop of"):
            wire.hub.send("engine-0", Stop(reason="x" * 100_001))
        link.send(load(1))
        assert await arrivals(wire.hub, 1) == [("engine-0", load(1))]

    on_wire(program)


@pytest.mark.parametrize("name", [b"\xff\xfe", b"scorer-0", b"engine-0", b"engine-x"])
def test_who_a_peer_is_its_key_says_and_not_the_peer(on_zmq: Callable[[Program], None], name: bytes):
    """So the holder of a key can neither speak for another, nor be sent what is another's, nor be more peers than one."""

    async def program(wire: ZmqWire) -> None:
        (good,) = await connected(wire, 0)
        raw = wire.dealer(name, keys=read_keys(wire.folder, "engine-1"))
        raw.send(GOOD_FRAME)
        assert await arrivals(wire.hub, 1) == [("engine-1", load(1))]
        wire.hub.send("engine-0", Stop(reason="not for engine-1"))
        assert await payload(good) == Stop(reason="not for engine-1")
        assert not raw.poll(100)
        assert not wire.hub.refused

    on_zmq(program)


@pytest.mark.parametrize("parts", [[b"", GOOD_FRAME], [GOOD_FRAME, b"too many"], [b"", GOOD_FRAME, b""]])
def test_a_message_in_any_number_of_parts_but_one_is_counted_and_dropped(on_zmq: Callable[[Program], None], parts: list[bytes]):
    async def program(wire: ZmqWire) -> None:
        raw = wire.dealer(b"anything", keys=read_keys(wire.folder, "engine-0"))
        raw.send_multipart(parts)
        raw.send(GOOD_FRAME)
        assert await arrivals(wire.hub, 1) == [("engine-0", load(1))]
        assert wire.hub.refused == {"malformed": 1}

    on_zmq(program)


def test_a_message_over_the_sockets_limit_costs_its_sender_that_connection_and_nobody_else(
    on_zmq: Callable[[Program], None], monkeypatch: pytest.MonkeyPatch
):
    """ZeroMQ closes the connection before the bytes are in memory; the sender connects again by itself."""
    monkeypatch.setattr(zmq_transport, "MAX_MESSAGE_BYTES", 100_000)

    async def program(wire: ZmqWire) -> None:
        (good,) = await connected(wire, 0)
        flooding = wire.dealer(b"anything", keys=read_keys(wire.folder, "engine-1"))
        flooding.send(b"x" * 200_000)
        for number in range(20):
            good.send(load(number))
            assert await arrivals(wire.hub, 1) == [("engine-0", load(number))]
            time.sleep(0.01)  # noqa: ASYNC251
        flooding.send(GOOD_FRAME)
        assert await arrivals(wire.hub, 1) == [("engine-1", load(1))]

    on_zmq(program)
