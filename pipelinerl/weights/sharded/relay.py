"""What an engine rank has of a policy so far, and passes on to the next rank with the same shard of another engine.

Shards of the same layout are the same bytes, so they travel as they lie, from the first byte to the last, each as soon as it has arrived
and its digest was right. What came as changes goes on as changes to a rank that can use them: the trainer's buckets, in the order in which
they came, with what the trainer's ranks said of them. Whoever receives either checks every piece again. When this rank begins to take
another policy, it hangs up on those who have not got all of this one.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import msgspec
import torch

from pipelinerl.weights.point_to_point import Channel, Connect
from pipelinerl.weights.sharded.connections import Ask, Server
from pipelinerl.weights.sharded.delivery import Arrival, Delivery
from pipelinerl.weights.sharded.plan import NOTHING, Header
from pipelinerl.weights.sharded.spots import Spot, packed

BEGIN_S = 5.0
"""Longest wait for this rank to begin to take what it is asked for, of which it may have been told a moment later. One that has gone on to
another policy, or was started again, never begins; then the trainer sends it."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Arriving:
    """A policy that is under way, or there."""

    policy: str
    """Digest of its weight buffer's name."""
    version: int
    memory: torch.Tensor
    """[bytes] uint8: the shard."""
    delivery: Delivery
    digests: Mapping[Spot, bytes]
    """As the trainer said them."""
    headers: tuple[Header, ...] = ()
    """What the trainer's ranks said, where some of it comes as changes; else none."""
    num_there: int = 0
    """Bytes from the first on that may be passed on."""
    num_buckets: int = 0
    """Of the delivery's, those that are there."""
    changes: dict[Arrival, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Those of them that came as changes, encoded."""
    _there: set[Spot] = dataclasses.field(default_factory=set)
    _next: int = 0
    """Of those by their first byte, the first that is not there."""

    def leads_from(self, held: int) -> bool:
        """Tell whether what is passed on to an engine rank with this version are the changes."""
        base = max((header.base for header in self.headers), default=-1)
        return 0 <= base <= held <= self.version

    def header(self, held: int) -> bytes:
        """What the next rank is told of it, which holds this version."""
        if self.leads_from(held):
            return msgspec.msgpack.encode(Header(version=self.version, parts=self.headers))
        pieces = self.delivery.pieces
        digests = b"".join(self.digests[spot] for spot in pieces.spots)
        return msgspec.msgpack.encode(Header(version=self.version, pieces=pieces.digest, digests=digests))

    def arrived(self, bucket: Arrival, changes: torch.Tensor | None) -> None:
        """Note that the next bucket is there, by `changes` where they are not None."""
        self.num_buckets += 1
        if changes is not None:
            self.changes[bucket] = changes
        self._there.update(bucket.spots)
        by_first_byte = self.delivery.pieces.by_first_byte
        while self._next < len(by_first_byte) and by_first_byte[self._next] in self._there:
            self._next += 1
        self.num_there = len(self.memory) if self._next == len(by_first_byte) else by_first_byte[self._next].first_byte

    def parts(self, held: int, *, bucket_bytes: int) -> Iterator[tuple[Callable[[], bool], Callable[[], torch.Tensor]]]:
        """Yield what is sent to an engine rank with this version, part by part: whether it is there yet, and what it is."""
        if self.leads_from(held):
            for number, bucket in enumerate(self.delivery.buckets):
                yield (lambda number=number: self.num_buckets > number), functools.partial(self._as_it_came, bucket)
            return
        end_byte = 0
        for part in self.memory.split(bucket_bytes):
            end_byte += len(part)
            yield (lambda end_byte=end_byte: self.num_there >= end_byte), (lambda part=part: part)

    def _as_it_came(self, bucket: Arrival) -> torch.Tensor:
        if (changes := self.changes.get(bucket)) is not None:
            return changes
        if bucket.first_byte is not None:
            return self.memory[bucket.first_byte : bucket.first_byte + bucket.num_bytes]
        return packed(bucket.spots, self.memory)


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
        pieces = arriving.delivery.pieces
        if self._published != pieces.digest:
            self._published = pieces.digest
            self._server.publish(f"pieces/{self._published}", pieces.encoded)
        with self._changed:
            self._arriving = arriving
            self._changed.notify_all()

    def arrived(self, bucket: Arrival, changes: torch.Tensor | None = None) -> None:
        """Note that its next bucket is there, laid over the shard where it came as `changes` ([bytes] uint8, encoded)."""
        with self._changed:
            assert self._arriving is not None
            self._arriving.arrived(bucket, changes)
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
            return self._arriving.header(ask.held) if self._arriving is not None and self._arriving.policy == ask.policy else None

    def _wait_for_words(self, ask: Ask) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._is(ask.policy), min(BEGIN_S, self._deadline_s))
            return NOTHING if self._arriving is None or not self._is(ask.policy) else self._arriving.header(ask.held)

    def _send(self, ask: Ask, channel: Channel, said: bytes) -> None:
        if said == NOTHING:
            return
        with self._changed:
            arriving = self._arriving if self._is(ask.policy) else None
        if arriving is None:
            raise RuntimeError("another policy is taken")
        for is_there, part_of in arriving.parts(ask.held, bucket_bytes=self._bucket_bytes):
            with self._changed:
                end = time.monotonic() + self._deadline_s
                while not is_there() and self._arriving is arriving:
                    if not self._changed.wait(end - time.monotonic()):
                        raise RuntimeError("what was to be passed on did not arrive")
            if self._arriving is not arriving:
                raise RuntimeError("another policy is taken")
            channel.send(part := part_of())
            self.num_sent += len(part)

    def _is(self, policy: str) -> bool:
        return self._arriving is not None and self._arriving.policy == policy
