"""What travels between two ends: a header of 40 bytes, and behind it, in frames that carry a message, the message's msgpack.

The header says which schema the sender speaks. It is a fingerprint of every message's name, fields and types, so two ends of different
code refuse each other in words, instead of misreading a field.
"""

from __future__ import annotations

import enum
import struct
import zlib
from typing import NamedTuple

from pipelinerl import messages
from pipelinerl.errors import WireError
from pipelinerl.messages import Message

MAGIC = b"PL"
WIRE = 1
"""Version of the header and of the rules in `conversation`; the messages have the fingerprint."""
_HEADER = struct.Struct("<2sBBIQQQQ")
HEADER_BYTES = _HEADER.size


class Kind(enum.IntEnum):
    """What a frame is for."""

    MESSAGE = 1
    """`number` counts messages from 1; a message follows."""
    HEARD = 2
    """Only says what was heard, see `Header.heard`."""
    ASK = 3
    """Asks for a sign: messages up to `number` were sent. The answer is `HEARD`, or `AGAIN`."""
    AGAIN = 4
    """Messages behind `heard` are missing: send them again."""
    GOODBYE = 5
    """The sender closes; nothing more should be sent to it."""


class Header(NamedTuple):
    """What a header says. `sender` and `receiver` are the identities that both ends drew at random when they came to life."""

    kind: Kind
    sender: int
    receiver: int
    """0 where the sender has not heard from anybody yet."""
    number: int
    heard: int
    """All messages of the other end up to this number were handed over: its credit for them returns."""


def schema_of(classes: list[type[Message]]) -> int:
    """The fingerprint of messages: their names, fields in order and types, as written in the source."""
    text = ";".join(f"{cls.__name__}({','.join(f'{name}:{kind}' for name, kind in cls.__annotations__.items())})" for cls in classes)
    return zlib.crc32(text.encode())


SCHEMA = schema_of([cls for cls in vars(messages).values() if isinstance(cls, type) and issubclass(cls, Message)])


def pack(kind: Kind, sender: int, receiver: int, number: int, heard: int) -> bytes:
    """A header."""
    return _HEADER.pack(MAGIC, WIRE, kind, SCHEMA, sender, receiver, number, heard)


def unpack(frame: bytes | memoryview) -> Header:
    """Read a frame's header. Raises `WireError` where it is none, or of another schema."""
    if len(frame) < HEADER_BYTES:
        raise WireError(f"{len(frame)} bytes are no frame: its header alone has {HEADER_BYTES}")
    magic, wire, kind, schema, sender, receiver, number, heard = _HEADER.unpack_from(frame)
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
    return Header(_KINDS[kind], sender, receiver, number, heard)


_KINDS = {int(kind): kind for kind in Kind}
