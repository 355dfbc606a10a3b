"""Messages to bytes and back: msgpack through msgspec, numpy columns as extension types holding raw little-endian bytes.

Strict on the way in: an unknown tag, an unknown field, a wrong dtype, columns of unequal length, or more bytes than the limit is a
`WireError`. Nothing is ever unpickled. Decoded columns are read-only views into the received buffer (no copy).
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Generic, TypeVar, get_args

import msgspec
import numpy as np

from pipelinerl.errors import WireError
from pipelinerl.messages import Message

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message. Smaller refuses long packed rows (a 1 M token row is 17 MB); larger lets one peer fill memory."""

DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<i4"),
    2: np.dtype("<f4"),
    3: np.dtype("?"),
    4: np.dtype("u1"),
    5: np.dtype("<u2"),
    6: np.dtype("<i8"),
    7: np.dtype("<f8"),
}
"""msgpack extension code of each column type. Codes are part of the wire format: add, never renumber."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_Ext = msgspec.msgpack.Ext
_M = TypeVar("_M", bound=Message)

assert sys.byteorder == "little", "columns travel as the machine's own little-endian bytes"


def encode(message: Message) -> bytes:
    """Encode any message. Raises `TypeError` for a column of a dtype not in `DTYPES` or of more than one dimension, `WireError` for more
    bytes than anybody accepts.
    """
    frame = _encoder.encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError(f"{type(message).__name__} of {len(frame)} bytes exceeds the limit of {MAX_MESSAGE_BYTES} bytes", reason="oversize")
    return frame


class Decoder(Generic[_M]):
    """Decodes the messages of one union of classes: what one kind of peer may say."""

    def __init__(self, accepts: Any) -> None:
        self.names = sorted(cls.__name__ for cls in get_args(accepts) or (accepts,))
        self._decoder = msgspec.msgpack.Decoder(accepts, ext_hook=_column, dec_hook=_check_dtype)

    def decode(self, frame: bytes | memoryview) -> _M:
        """Decode one frame. Raises `WireError` saying what was wrong with it and which messages are accepted."""
        size = len(frame)
        if size > MAX_MESSAGE_BYTES:
            raise WireError(f"message of {size} bytes exceeds the limit of {MAX_MESSAGE_BYTES} bytes", reason="oversize")
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise WireError(f"{size} bytes are not one of {', '.join(self.names)}: {error}") from error


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The request that an unreadable answer belongs to; its other fields are not looked at."""

    rollout_id: Annotated[str, msgspec.Meta(max_length=512)] = ""
    attempt: int = 0
    turn: int = 0
    request_id: int | None = None


def about(frame: bytes | memoryview) -> About:
    """Read which request undecodable bytes belong to; empty where even that cannot be read."""
    try:
        return _about.decode(frame) if len(frame) <= MAX_MESSAGE_BYTES else About()
    except (msgspec.DecodeError, ValueError, RecursionError):
        return About()


_about = msgspec.msgpack.Decoder(About)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        code = _CODES.get(value.dtype)
        if code is None or value.ndim != 1:
            raise TypeError(
                f"column of dtype {value.dtype} and {value.ndim} dimensions cannot travel; use 1-D of {sorted(map(str, _CODES))}"
            )
        return _Ext(code, value.data if value.flags.c_contiguous else np.ascontiguousarray(value).data)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot travel: {value!r}")


def _column(code: int, data: memoryview) -> np.ndarray:
    dtype = DTYPES.get(code)
    if dtype is None:
        raise ValueError(f"unknown extension type {code}; known: {sorted(DTYPES)}")
    return np.frombuffer(data, dtype)


def _check_dtype(expected: Any, value: Any) -> Any:
    dtype = _wanted(expected)
    if type(value) is np.ndarray and value.dtype is dtype:
        return value
    if type(value) is not np.ndarray or value.dtype != dtype:
        got = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(f"expected a column of {dtype}, got {got}")
    return value


def _wanted(expected: Any) -> np.dtype[Any]:
    known = _wanted_cache.get(id(expected))
    if known is None:
        known = _wanted_cache[id(expected)] = (np.dtype(get_args(get_args(expected)[1])[0]), expected)
    return known[0]


_wanted_cache: dict[int, tuple[np.dtype[Any], Any]] = {}
"""The dtype of a column's type, by the type's identity (hashing one takes longer than reading the column); the type is kept, so that its
identity stays its own.
"""
_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
