"""Frames between two ends: a header of 40 bytes, followed, in frames that carry messages, by each one's length and msgpack.

The header says which schema the sender speaks. It is a fingerprint of every message's name, fields and types, so two ends of different
code refuse each other in words, instead of misreading a field.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipelinerl import messages
from pipelinerl.errors import WireError
from pipelinerl.messages import Message

MAGIC = b"PL"
WIRE = 3
"""Version of the header and of the rules in `session`; the messages have the fingerprint."""
_HEADER = struct.Struct("<2sBBIQQQQ")
HEADER_BYTES = _HEADER.size
_LENGTH = struct.Struct("<I")
OVERHEAD_BYTES = HEADER_BYTES + _LENGTH.size
"""Bytes of a frame beside those of the one message in it."""
MAX_BATCH_FRAME_BYTES = (1 << 16) - HEADER_BYTES - 1
"""Messages sent at once share frames up to this size. A frame costs, at both ends, about as much as encrypting 10 KB; with more than
64 KB the saving is small, and ZeroMQ is handed them without a copy, which costs more than one (`zmq.COPY_BELOW_BYTES`).
"""


class Kind(enum.IntEnum):
    """The purpose of a frame."""

    MESSAGES = 1
    """`number` counts frames that carry messages from 1; the messages follow, each behind its length (4 bytes, little-endian)."""
    ACK = 2
    """Only acknowledges, see `Header.acked`."""
    PROBE = 3
    """Asks for a sign: frames up to `number` were sent. The answer is `ACK`, or `RESEND`."""
    RESEND = 4
    """Frames behind `acked` are missing: send them again."""
    GOODBYE = 5
    """The sender closes; nothing more should be sent to it."""


class Header(NamedTuple):
    """The fields of a header. `sender` and `receiver` are the identities that both ends drew at random when they came to life."""

    kind: Kind
    sender: int
    receiver: int
    """0 where the sender has not heard from anybody yet."""
    number: int
    acked: int
    """All frames with messages of the other end up to this number were handed over: its credit for them returns."""


def schema_of(classes: list[type[Message]]) -> int:
    """The fingerprint of messages: their names, fields in order and types, as written in the source."""
    text = ";".join(f"{cls.__name__}({','.join(f'{name}:{kind}' for name, kind in cls.__annotations__.items())})" for cls in classes)
    return zlib.crc32(text.encode())


SCHEMA = schema_of([cls for cls in vars(messages).values() if isinstance(cls, type) and issubclass(cls, Message)])


def pack(kind: Kind, sender: int, receiver: int, number: int, acked: int) -> bytes:
    """A header."""
    return _HEADER.pack(MAGIC, WIRE, kind, SCHEMA, sender, receiver, number, acked)


def unpack(frame: bytes | memoryview) -> Header:
    """Read a frame's header. Raises `WireError` where it is none, or of another schema."""
    if len(frame) < HEADER_BYTES:
        raise WireError(f"{len(frame)} bytes are no frame: its header alone has {HEADER_BYTES}")
    magic, wire, kind, schema, sender, receiver, number, acked = _HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise WireError(f"a frame begins with {MAGIC!r}, got {magic!r}")
    if wire != WIRE or schema != SCHEMA:
        raise WireError(
            f"the other end speaks wire {wire} and schema {schema:08x}, this one {WIRE} and {SCHEMA:08x}: install the same version of"
            " pipelinerl on every machine",
            reason="schema",
        )
    if kind not in _KINDS or not sender:
        raise WireError(f"frame of kind {kind} from {sender}; known kinds are {sorted(_KINDS)}, and nobody is 0")
    return Header(_KINDS[kind], sender, receiver, number, acked)


def join(messages: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Deal messages out to as few frames as `MAX_BATCH_FRAME_BYTES` allows, and give the parts behind each header."""
    parts: list[bytes] = []
    size = 0
    for message in messages:
        size += _LENGTH.size + len(message)
        if parts and size > MAX_BATCH_FRAME_BYTES:
            yield parts
            parts, size = [], _LENGTH.size + len(message)
        parts += (_LENGTH.pack(len(message)), message)
    if parts:
        yield parts


def split(frame: bytes | memoryview) -> list[memoryview]:
    """The encoded messages in a frame of kind `MESSAGES`.

    Raises `WireError` where a length leads past its end, and for several messages in more than `MAX_BATCH_FRAME_BYTES`: how many they may
    be has a bound by that.
    """
    view, at, size = memoryview(frame), HEADER_BYTES, len(frame)
    messages: list[memoryview] = []
    while at < size:
        start = at + _LENGTH.size
        end = start + _LENGTH.unpack_from(view, at)[0] if start <= size else start
        if end > size:
            raise WireError(f"a frame ends after {size - at} bytes, within its message {len(messages)}, which has {end - at}")
        if end < size > HEADER_BYTES + MAX_BATCH_FRAME_BYTES:
            words = f"several messages in {size - HEADER_BYTES} bytes, expected {MAX_BATCH_FRAME_BYTES} at most"
            raise WireError(words, reason="oversize")
        messages.append(view[start:end])
        at = end
    return messages


_KINDS = {int(kind): kind for kind in Kind}
