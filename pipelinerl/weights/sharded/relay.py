"""What an engine rank has of a policy so far, and passes on to the next rank with the same shard of another engine.

Shards of the same layout are the same bytes, so they travel as they lie, from the first byte to the last, each as soon as it has arrived
and its digest was right. Whoever receives them checks every piece again. When this rank begins to take another policy, it hangs up on those
who have not got all of this one.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.weights.base import itemsize_of
from pipelinerl.weights.manifest import digest_of
from pipelinerl.weights.point_to_point import Channel, Connect
from pipelinerl.weights.reshard import Part
from pipelinerl.weights.sharded.connections import Ask, Server
from pipelinerl.weights.sharded.digests import seed_of
from pipelinerl.weights.sharded.plan import NOTHING, Header, Piece

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
BEGIN_S = 5.0
"""Longest wait for this rank to begin to take what it is asked for, of which it may have been told a moment later. One that has gone on to
another policy, or was started again, never begins; then the trainer sends it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spot:
    """The place of a piece in an engine rank's shard."""

    piece: Piece
    seed: int
    """Of its digest."""
    first_byte: int
    """Of its first element, within the shard."""
    end_byte: int
    """One past its last element."""
    num_bytes: int
    shape: tuple[int, ...]
    """Of its bytes, in as few dimensions as they have there: runs of the last one, which lie together."""
    strides: tuple[int, ...]
    """Bytes from one to the next in every dimension."""

    @property
    def is_contiguous(self) -> bool:
        return len(self.shape) == 1

    def within(self, shard: Bytes) -> Bytes:
        """Its bytes, in a shard; nothing is copied."""
        return np.ndarray(self.shape, np.uint8, shard, self.first_byte, self.strides)


def spot_of(piece: Piece, parts: Mapping[str, Sequence[Part]]) -> Spot:
    """Find a piece's place. Raises `WeightsError` where it lies in none of this rank's parts."""
    for part in parts.get(piece.name, ()):
        if len(part.box) == len(piece.box) and all(
            first <= start < end <= last for (start, end), (first, last) in zip(piece.box, part.box, strict=True)
        ):
            within = [(start - first, end - first) for (start, end), (first, _) in zip(piece.box, part.box, strict=True)]
            runs = [(size := itemsize_of(part.tensor), 1)]
            for number in reversed(range(len(within))):
                count, stride = within[number][1] - within[number][0], size * math.prod(part.tensor.shape[number + 1 :])
                if stride == runs[0][0] * runs[0][1]:
                    runs[0] = count * runs[0][0], runs[0][1]
                else:
                    runs.insert(0, (count, stride))
            offset = sum(start * size * math.prod(part.tensor.shape[number + 1 :]) for number, (start, _) in enumerate(within))
            first_byte = part.tensor.offset_bytes + offset
            return Spot(
                piece=piece,
                seed=seed_of(piece),
                first_byte=first_byte,
                end_byte=first_byte + sum((count - 1) * stride for count, stride in runs) + 1,
                num_bytes=math.prod(count for count, _ in runs),
                shape=tuple(count for count, _ in runs),
                strides=tuple(stride for _, stride in runs),
            )
    raise WeightsError(f"the piece {piece.box} of {piece.name} lies in no part that this engine rank holds")


class Pieces:
    """Those of a rank's shard, in the order in which they are whole when the shard arrives from its first byte on."""

    def __init__(self, spots: Sequence[Spot]) -> None:
        self.spots = tuple(sorted(spots, key=lambda spot: (spot.end_byte, spot.first_byte)))
        self.encoded = msgspec.json.encode([spot.piece for spot in self.spots])
        self.digest = digest_of(self.encoded)
        self.by_first_byte = tuple(sorted(spots, key=lambda spot: spot.first_byte))


@dataclasses.dataclass(slots=True, kw_only=True)
class Arriving:
    """A policy that is under way, or there."""

    policy: str
    """Digest of its weight buffer's name."""
    version: int
    memory: torch.Tensor
    """[bytes] uint8: the shard."""
    pieces: Pieces
    digests: Mapping[Spot, bytes]
    """As the trainer said them."""
    num_there: int = 0
    """Bytes from the first on that may be passed on."""
    _there: set[Spot] = dataclasses.field(default_factory=set)
    _next: int = 0
    """Of those by their first byte, the first that is not there."""

    def header(self) -> bytes:
        """What the next rank is told of it."""
        digests = b"".join(self.digests[spot] for spot in self.pieces.spots)
        return msgspec.msgpack.encode(Header(version=self.version, pieces=self.pieces.digest, digests=digests))

    def arrived(self, spots: Sequence[Spot]) -> None:
        """Note that pieces are there."""
        self._there.update(spots)
        by_first_byte = self.pieces.by_first_byte
        while self._next < len(by_first_byte) and by_first_byte[self._next] in self._there:
            self._next += 1
        self.num_there = len(self.memory) if self._next == len(by_first_byte) else by_first_byte[self._next].first_byte


class Relay:
    """Serves the policy that this rank takes, or took last."""

    def __init__(self, connect: Connect, *, who: str, address: str, deadline_s: float, bucket_bytes: int) -> None:
        self._deadline_s = deadline_s
        self._bucket_bytes = bucket_bytes
        self._arriving: Arriving | None = None
        self._published = ""
        """Digest of the list of pieces that callers can get."""
        self._changed = threading.Condition()
        self._server = Server(
            connect,
            who=who,
            address=address,
            deadline_s=deadline_s,
            words=self._words,
            wait_for_words=self._wait_for_words,
            send=self._send,
        )
        self.place = self._server.place
        self.num_sent = 0
        """Bytes of policies that were passed on so far."""

    def begin(self, arriving: Arriving) -> None:
        """Pass on what arrives from now on."""
        if self._published != arriving.pieces.digest:
            self._published = arriving.pieces.digest
            self._server.publish(f"pieces/{self._published}", arriving.pieces.encoded)
        with self._changed:
            self._arriving = arriving
            self._changed.notify_all()

    def arrived(self, spots: Sequence[Spot]) -> None:
        """Note that pieces of it are there."""
        with self._changed:
            assert self._arriving is not None
            self._arriving.arrived(spots)
            self._changed.notify_all()

    def withdraw(self) -> None:
        """Pass nothing on any more: its memory is about to change."""
        with self._changed:
            self._arriving = None
            self._changed.notify_all()
        self._server.hang_up()

    def close(self) -> None:
        """Hang up for good; safe to repeat."""
        self.withdraw()
        self._server.close()

    def _words(self, ask: Ask) -> bytes | None:
        with self._changed:
            return self._arriving.header() if self._arriving is not None and self._arriving.policy == ask.policy else None

    def _wait_for_words(self, ask: Ask) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._is(ask.policy), min(BEGIN_S, self._deadline_s))
            return NOTHING if self._arriving is None or not self._is(ask.policy) else self._arriving.header()

    def _send(self, ask: Ask, channel: Channel, said: bytes) -> None:
        if said == NOTHING:
            return
        with self._changed:
            arriving = self._arriving if self._is(ask.policy) else None
        if arriving is None:
            raise RuntimeError("another policy is taken")
        for part in arriving.memory.split(self._bucket_bytes):
            end_byte = part.storage_offset() - arriving.memory.storage_offset() + len(part)
            with self._changed:
                end = time.monotonic() + self._deadline_s
                while arriving.num_there < end_byte and self._arriving is arriving:
                    if not self._changed.wait(end - time.monotonic()):
                        raise RuntimeError("what was to be passed on did not arrive")
            if self._arriving is not arriving:
                raise RuntimeError("another policy is taken")
            channel.send(part)
            self.num_sent += len(part)

    def _is(self, policy: str) -> bool:
        return self._arriving is not None and self._arriving.policy == policy
