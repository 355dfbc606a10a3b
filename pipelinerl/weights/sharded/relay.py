"""What an engine rank has of a policy so far, and passes on to the next rank with the same shard of another engine.

Shards of the same layout are the same bytes, so they travel as they lie, from the first byte to the last, each as soon as it has arrived
and its digest was right. Whoever receives them checks every piece again. When this rank begins to take another policy, it hangs up.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.weights.base import itemsize_of
from pipelinerl.weights.manifest import digest_of
from pipelinerl.weights.point_to_point import Channel, Connect
from pipelinerl.weights.reshard import Part
from pipelinerl.weights.sharded.connections import Ask, Server
from pipelinerl.weights.sharded.digests import NUM_BYTES
from pipelinerl.weights.sharded.plan import Piece
from pipelinerl.weights.sharded.source import NOTHING, numbers, send_bytes

BEGIN_S = 5.0
"""Longest wait for this rank to begin to take what it is asked for, of which it may have been told a moment later. One that has gone on to
another policy, or was started again, never begins; then the trainer sends it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """The place of a piece in an engine rank's shard."""

    piece: Piece
    part: Part
    slices: tuple[slice, ...]
    """Within the part."""
    first_byte: int
    """Of its first element, within the shard."""
    end_byte: int
    """One past its last element."""
    num_bytes: int

    @property
    def is_contiguous(self) -> bool:
        return self.end_byte - self.first_byte == self.num_bytes


def spot_of(piece: Piece, parts: Mapping[str, Sequence[Part]]) -> Spot:
    """Find a piece's place. Raises `WeightsError` where it lies in none of this rank's parts."""
    for part in parts.get(piece.name, ()):
        if len(part.box) == len(piece.box) and all(
            first <= start < end <= last for (start, end), (first, last) in zip(piece.box, part.box, strict=True)
        ):
            slices = tuple(slice(start - first, end - first) for (start, end), (first, _) in zip(piece.box, part.box, strict=True))
            strides = [math.prod(part.tensor.shape[number + 1 :]) for number in range(len(slices))]
            size = itemsize_of(part.tensor)
            first = sum(one.start * stride for one, stride in zip(slices, strides, strict=True))
            last = sum((one.stop - 1) * stride for one, stride in zip(slices, strides, strict=True))
            return Spot(
                piece=piece,
                part=part,
                slices=slices,
                first_byte=part.tensor.offset_bytes + first * size,
                end_byte=part.tensor.offset_bytes + (last + 1) * size,
                num_bytes=math.prod(one.stop - one.start for one in slices) * size,
            )
    raise WeightsError(f"the piece {piece.box} of {piece.name} lies in no part that this engine rank holds")


@dataclasses.dataclass(slots=True, kw_only=True)
class Arriving:
    """A policy that is under way, or there."""

    policy: str
    """Digest of its weight buffer's name."""
    version: int
    memory: torch.Tensor
    """[bytes] uint8: the shard."""
    spots: Sequence[Spot]
    digests: Sequence[int]
    """As the trainer said them."""
    encoded: bytes = b""
    """The pieces, for the next rank."""
    num_there: int = 0
    """Bytes from the first on that may be passed on."""
    _missing: dict[int, Spot] = dataclasses.field(init=False)
    _by_place: Iterator[Spot] = dataclasses.field(init=False)
    _next: Spot | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.encoded = msgspec.json.encode([spot.piece for spot in self.spots])
        self._missing = {id(spot): spot for spot in self.spots}
        self._by_place = iter(sorted(self.spots, key=lambda spot: spot.first_byte))
        self._next = next(self._by_place, None)

    def arrived(self, spot: Spot) -> None:
        """Note that a piece is there."""
        del self._missing[id(spot)]
        while self._next is not None and id(self._next) not in self._missing:
            self._next = next(self._by_place, None)
        self.num_there = len(self.memory) if self._next is None else self._next.first_byte


class Relay:
    """Serves the policy that this rank takes, or took last."""

    def __init__(self, connect: Connect, *, who: str, address: str, deadline_s: float, bucket_bytes: int) -> None:
        self._deadline_s = deadline_s
        self._bucket_bytes = bucket_bytes
        self._arriving: Arriving | None = None
        self._changed = threading.Condition()
        self._server = Server(connect, who=who, address=address, deadline_s=deadline_s, answer=self._answer)
        self.place = self._server.place
        self.num_sent = 0
        """Bytes of policies that were passed on so far."""

    def begin(self, arriving: Arriving) -> None:
        """Pass on what arrives from now on."""
        with self._changed:
            self._arriving = arriving
            self._changed.notify_all()

    def arrived(self, spot: Spot) -> None:
        """Note that a piece of it is there."""
        with self._changed:
            assert self._arriving is not None
            self._arriving.arrived(spot)
            self._changed.notify_all()

    def withdraw(self) -> None:
        """Pass nothing on any more: its memory is about to change."""
        with self._changed:
            was_there, self._arriving = self._arriving is not None, None
            self._changed.notify_all()
        if was_there:
            self._server.hang_up()

    def close(self) -> None:
        """Hang up for good; safe to repeat."""
        self.withdraw()
        self._server.close()

    def _answer(self, ask: Ask, channel: Channel) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is(ask.policy), min(BEGIN_S, self._deadline_s))
            arriving = self._arriving if self._is(ask.policy) else None
        if arriving is None:
            channel.send(numbers(NOTHING, 0))
            channel.receive(numbers(0))
            return
        is_known = ask.known == digest_of(arriving.encoded)
        channel.send(numbers(arriving.version, 0 if is_known else len(arriving.encoded)))
        send_bytes(channel, b"" if is_known else arriving.encoded)
        send_bytes(channel, b"".join(digest.to_bytes(NUM_BYTES, "little") for digest in arriving.digests))
        for part in arriving.memory.split(self._bucket_bytes):
            self.num_sent += len(part)
            end_byte = part.storage_offset() - arriving.memory.storage_offset() + len(part)
            with self._changed:
                end = time.monotonic() + self._deadline_s
                while arriving.num_there < end_byte:
                    if self._arriving is not arriving or not self._changed.wait(end - time.monotonic()):
                        raise RuntimeError("what was to be passed on did not arrive")
            channel.send(part)
        channel.receive(numbers(0))

    def _is(self, policy: str) -> bool:
        return self._arriving is not None and self._arriving.policy == policy
