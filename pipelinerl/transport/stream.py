"""Messages over a stream socket between two processes of one machine: four bytes of length, then msgpack."""

from __future__ import annotations

import socket
import struct

from pipelinerl.errors import WireError
from pipelinerl.messages import Message
from pipelinerl.transport.codec import MAX_MESSAGE_BYTES, encode

CHUNK_BYTES = 256 << 10
"""Read from a stream at once, at most: what the system's default socket buffer holds."""
_LENGTH = struct.Struct("<I")


def frame(message: Message) -> bytes:
    """Encode a message for a stream: four bytes of length, then msgpack."""
    body = encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Reads a stream socket and cuts what arrives back into the frames it was made of."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._chunk = bytearray(CHUNK_BYTES)  # `recv` would allocate, and give back, its full size at every call
        self._rest = bytearray()

    def receive(self, flags: int = 0) -> list[bytes] | None:
        """Read once and return the frames that are whole now; None at the end of the stream.

        Raises `WireError` on a length above the limit, `BlockingIOError` where the socket would have to wait and must not.
        """
        size = self._channel.recv_into(self._chunk, 0, flags)
        if not size:
            return None
        self._rest += memoryview(self._chunk)[:size]
        whole: list[bytes] = []
        start = 0
        while len(self._rest) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._rest, start)
            if length > MAX_MESSAGE_BYTES:
                raise WireError(f"a frame of {length} bytes exceeds the limit of {MAX_MESSAGE_BYTES} bytes")
            end = start + _LENGTH.size + length
            if end > len(self._rest):
                break
            whole.append(bytes(self._rest[start + _LENGTH.size : end]))
            start = end
        del self._rest[:start]
        return whole
