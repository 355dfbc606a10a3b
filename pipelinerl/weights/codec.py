"""A delta in few bytes: gaps between positions and new values, each close to its entropy.

Gaps between independent changes are geometric: their low bits are noise, kept as they are, and the rest, in units of `2**low_bits`, goes
through a Huffman code (Rice's split with a better code for the quotients). A value's bits are turned by one, so that the sign joins the
mantissa and the exponent fills a byte: exponents of weights take a few values and compress well, mantissas do not and are stored. The
Huffman coder is zlib's, in `Z_HUFFMAN_ONLY`: it adapts every few ten thousand symbols, hence from tensor to tensor.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from pipelinerl.errors import WeightsError
from pipelinerl.weights.delta import Delta, Positions

ESCAPE = 255
"""Quotient byte of a gap too long for a byte; its quotient stands in a list of its own."""
SMALL_QUOTIENT_BITS = 4
"""Quotients are about `2**4` on average: enough for a Huffman code to come within a hundredth of the entropy, and few escapes."""
MAX_COUNT = 1 << 40
"""Elements of one size in one message; more is not a policy but an attack on this process's memory."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The changes of elements of one size."""

    itemsize: int
    count: int
    low_bits: int
    quotients: bytes
    escapes: bytes
    """Quotients of escaped gaps, 8 bytes each, deflated."""
    remainders: bytes
    """`low_bits` bits of each gap, packed."""
    planes: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=8)]
    """The values' bytes, least significant first, one stream each."""


_parts = msgspec.msgpack.Decoder(Annotated[list[_Part], msgspec.Meta(max_length=4)])


def encode(changes: Delta) -> bytes:
    """Encode a delta."""
    parts = [
        _encode_part(size, changes.positions[size], changes.values[size]) for size in changes.positions if len(changes.positions[size])
    ]
    return msgspec.msgpack.encode(parts)


def decode(data: bytes | memoryview, *, most: Mapping[int, int] | None = None) -> Delta:
    """Decode a delta. Raises `WeightsError` for bytes that are none.

    `most` elements of each size: a few bytes that claim more are refused before room is made for them.
    """
    try:
        parts = _parts.decode(data)
        for part in parts:
            if most is not None and part.count > most.get(part.itemsize, 0):
                raise ValueError(f"{part.count} elements of {part.itemsize} bytes, of {most.get(part.itemsize, 0)} that there are")
        decoded = {part.itemsize: _decode_part(part) for part in parts}
        if len(decoded) != len(parts):
            raise ValueError("elements of one size come twice")
    except (msgspec.DecodeError, zlib.error, ValueError, KeyError) as error:
        raise WeightsError(f"{len(data)} bytes are not the changes of a policy: {error}; not taken") from error
    return Delta(
        positions={size: positions for size, (positions, _) in decoded.items()},
        values={size: values for size, (_, values) in decoded.items()},
    )


def _encode_part(size: int, positions: Positions, values: npt.NDArray[np.unsignedinteger[Any]]) -> _Part:
    gaps = np.diff(positions, prepend=-1) - 1
    mean = float(gaps.mean())
    low_bits = max(0, round(math.log2(mean * math.log(2) + 1)) - SMALL_QUOTIENT_BITS + 1)
    quotients = gaps >> low_bits
    is_escaped = quotients >= ESCAPE
    turned = _turn_left(values).view(np.uint8).reshape(-1, size)
    return _Part(
        itemsize=size,
        count=len(positions),
        low_bits=low_bits,
        quotients=_squeeze(np.minimum(quotients, ESCAPE).astype(np.uint8)),
        escapes=_squeeze(quotients[is_escaped]),
        remainders=_pack(gaps, low_bits),
        planes=tuple(_squeeze(np.ascontiguousarray(turned[:, plane])) for plane in range(size)),
    )


def _decode_part(part: _Part) -> tuple[Positions, npt.NDArray[np.unsignedinteger[Any]]]:
    if not (
        0 <= part.count <= MAX_COUNT and 0 <= part.low_bits < 48 and part.itemsize in (1, 2, 4, 8) and len(part.planes) == part.itemsize
    ):
        raise ValueError(f"{part.count} elements of {part.itemsize} bytes in {len(part.planes)} planes, {part.low_bits} low bits")
    quotients = np.frombuffer(_expand(part.quotients, part.count), np.uint8).astype(np.int64)
    is_escaped = quotients == ESCAPE
    quotients[is_escaped] = np.frombuffer(_expand(part.escapes, 8 * int(is_escaped.sum())), np.int64)
    gaps = (quotients << part.low_bits) | _unpack(part.remainders, part.low_bits, part.count)
    turned = np.empty((part.count, part.itemsize), np.uint8)
    for plane, data in enumerate(part.planes):
        turned[:, plane] = np.frombuffer(_expand(data, part.count), np.uint8)
    return np.cumsum(gaps + 1) - 1, _turn_right(turned.view(f"<u{part.itemsize}")[:, 0])


def _turn_left(values: npt.NDArray[np.unsignedinteger[Any]]) -> npt.NDArray[np.unsignedinteger[Any]]:
    """The sign bit behind the mantissa, so that the exponent of a bfloat16 or float32 fills the highest byte."""
    one, rest = values.dtype.type(1), values.dtype.type(8 * values.itemsize - 1)
    return (values << one) | (values >> rest)


def _turn_right(values: npt.NDArray[np.unsignedinteger[Any]]) -> npt.NDArray[np.unsignedinteger[Any]]:
    one, rest = values.dtype.type(1), values.dtype.type(8 * values.itemsize - 1)
    return (values >> one) | (values << rest)


def _pack(gaps: Positions, low_bits: int) -> bytes:
    if not low_bits:
        return b""
    shifts = np.arange(low_bits, dtype=np.int64)
    blocks = (gaps[start : start + (1 << 16)] for start in range(0, len(gaps), 1 << 16))  # a multiple of 8: no bits are left over between
    return b"".join(np.packbits(((block[:, None] >> shifts) & 1).astype(np.uint8)).tobytes() for block in blocks)


def _unpack(data: bytes, low_bits: int, count: int) -> Positions:
    if len(data) != -(-count * low_bits // 8):
        raise ValueError(f"{len(data)} bytes of low bits for {count} gaps of {low_bits} bits each")
    if not low_bits:
        return np.zeros(count, np.int64)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=count * low_bits).reshape(count, low_bits)
    found = np.zeros(count, np.int64)
    for bit in range(low_bits):
        found |= bits[:, bit].astype(np.int64) << bit
    return found


def _squeeze(data: npt.NDArray[Any]) -> bytes:
    coder = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(data.tobytes()) + coder.flush()


def _expand(data: bytes, num_bytes: int) -> bytes:
    """Decompress exactly `num_bytes`: a stream that holds more is stopped there, so a small message cannot fill memory."""
    decoder = zlib.decompressobj(-15)
    found = decoder.decompress(data, num_bytes + 1)
    if len(found) != num_bytes:
        raise ValueError(
            f"a stream holds {'more than ' if len(found) > num_bytes else ''}{min(len(found), num_bytes)} of {num_bytes} bytes"
        )
    return found
