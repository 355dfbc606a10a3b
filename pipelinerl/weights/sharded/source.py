"""A trainer rank's end: it holds its pieces of policies ready, and sends each engine rank those that it needs.

Rank 0 also has the manifest, and says to each engine rank from whom to take a policy: the first to ask for one takes it from the trainer's
ranks, the next from the engine rank that asked before it, and so on. So a policy leaves the trainer once, however many engines there are,
and every engine rank passes its shard on once at most. Whoever could not get it from an engine takes it from the trainer.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch

from pipelinerl.messages import Tensor
from pipelinerl.weights.manifest import digest_of
from pipelinerl.weights.point_to_point import DEADLINE_S, Channel, Connect
from pipelinerl.weights.sharded.connections import Ask, Place, Server
from pipelinerl.weights.sharded.digests import NUM_BYTES, add_up, digest_of_piece
from pipelinerl.weights.sharded.plan import Piece, SourcePlan, num_bytes_of
from pipelinerl.weights.throttle import throttle

NOTHING = -1
"""Stands for a version where a weight buffer holds none."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """From whom an engine rank takes a policy."""

    sources: tuple[Place, ...]
    """The trainer's ranks that hold something for it."""
    upstream: Place | None = None
    """The engine rank to take it from; None: the trainer's ranks."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Held:
    memory: torch.Tensor
    """[plan.num_bytes] uint8."""
    version: int = NOTHING
    digests: dict[int, int] = dataclasses.field(default_factory=dict)
    """By the first byte of each piece."""


class ShardSource:
    """One trainer rank's weight buffers, and the server that sends them."""

    def __init__(
        self,
        connect: Connect,
        *,
        rank: int,
        address: str = "127.0.0.1",
        deadline_s: float = DEADLINE_S,
        reserve: Callable[[int], torch.Tensor] = lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8),
    ) -> None:
        """`reserve` gives memory of the host for a weight buffer. Raises `WeightsError` where nobody may listen on `address`."""
        self._rank = rank
        self._reserve = reserve
        self._held: dict[int, _Held] = {}
        self._manifests: dict[int, bytes] = {}
        self._plan = SourcePlan(pieces=(), num_bytes=0, buckets=())
        self._tensors: dict[str, Tensor] = {}
        self._lists: tuple[bytes, ...] = ()
        """By engine rank: its buckets, encoded."""
        self._routes = _Routes()
        self._server = Server(
            connect, who=f"trainer rank {rank}", address=address, deadline_s=deadline_s, answer=self._answer, route=self._routes.answer
        )
        self.place = self._server.place
        self.num_sent = 0
        """Bytes of policies that left so far."""

    def follow(self, plan: SourcePlan, layout: Sequence[Tensor]) -> None:
        """Send by this plan from now on."""
        self._plan, self._tensors = plan, {tensor.name: tensor for tensor in layout}
        self._lists = tuple(msgspec.json.encode(buckets) for buckets in plan.buckets)

    def lead(self, sources: Sequence[Place], plans: Sequence[SourcePlan]) -> None:
        """Say to engine ranks where to take policies: at these places of the trainer's ranks."""
        num_targets = len(plans[0].buckets)
        self._routes.sources = tuple(
            tuple(place for place, plan in zip(sources, plans, strict=True) if plan.buckets[target]) for target in range(num_targets)
        )

    def make(self, number: int) -> None:
        """Make weight buffer `number`, unless it is there already."""
        if number not in self._held:
            self._held[number] = _Held(memory=self._reserve(self._plan.num_bytes))

    def views(self, number: int) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Each piece, and where its values go; what the weight buffer held before is not sent any more."""
        held = self._held[number]
        held.version = NOTHING
        for piece, data in self._pieces(held):
            dtype = getattr(torch, self._tensors[piece.name].dtype)
            yield piece, data.view(dtype).view([end - first for first, end in piece.box])

    def seal(self, number: int, version: int) -> dict[str, int]:
        """Make what was written readable as `version`; return this rank's sums (`digests.Sums`)."""
        held = self._held[number]
        found = []
        for piece, data in self._pieces(held):
            found.append((piece, digest_of_piece(piece, data)))
            throttle()
        held.digests = {piece.first_byte: digest for piece, digest in found}
        held.version = version
        return add_up(found)

    def offer(self, number: int, encoded: bytes) -> None:
        """Give out this encoded manifest for a weight buffer that all ranks have sealed; rank 0 calls it."""
        self._manifests[number] = encoded
        self._routes.forget(number)

    def close(self) -> None:
        """Hang up on everybody; safe to repeat."""
        self._server.close()

    def _pieces(self, held: _Held) -> Iterator[tuple[Piece, torch.Tensor]]:
        for piece in self._plan.pieces:
            size = num_bytes_of(piece, self._tensors[piece.name])
            yield piece, held.memory[piece.first_byte : piece.first_byte + size]

    def _answer(self, ask: Ask, channel: Channel) -> None:
        if ask.kind == "manifest":
            encoded = self._manifests.get(ask.number, b"")
            channel.send(numbers(len(encoded)))
            send_bytes(channel, encoded)
        else:
            self._send_shard(ask, channel)
        channel.receive(numbers(0))  # all of it has arrived

    def _send_shard(self, ask: Ask, channel: Channel) -> None:
        held = self._held.get(ask.number)
        buckets = self._plan.buckets[ask.target] if ask.target < len(self._plan.buckets) else ()
        if held is None or held.version == NOTHING or not buckets:
            channel.send(numbers(NOTHING, 0))
            return
        encoded = self._lists[ask.target]
        is_known = ask.known == digest_of(encoded)
        channel.send(numbers(held.version, 0 if is_known else len(encoded)))
        send_bytes(channel, b"" if is_known else encoded)
        send_bytes(
            channel,
            b"".join(
                held.digests[bucket.first_byte + piece.first_byte].to_bytes(NUM_BYTES, "little")
                for bucket in buckets
                for piece in bucket.pieces
            ),
        )
        for bucket in buckets:
            channel.send(held.memory[bucket.first_byte : bucket.first_byte + bucket.num_bytes])
            self.num_sent += bucket.num_bytes


class _Routes:
    """Who takes a policy from whom. A rule: no socket, no clock."""

    def __init__(self) -> None:
        self.sources: tuple[tuple[Place, ...], ...] = ()
        """By engine rank."""
        self._chains: dict[tuple[int, int, str], list[Place]] = {}
        """Engine ranks that asked for a policy, in that order, by (weight buffer, rank, layout)."""
        self._lock = threading.Lock()

    def forget(self, number: int) -> None:
        """Begin anew for a weight buffer: it holds another policy."""
        with self._lock:
            self._chains = {key: chain for key, chain in self._chains.items() if key[0] != number}

    def answer(self, ask: Ask) -> bytes:
        sources = self.sources[ask.target] if ask.target < len(self.sources) else ()
        with self._lock:
            chain = self._chains.setdefault((ask.number, ask.target, ask.layout), [])
            chain[:] = [place for place in chain if place != ask.place and place not in ask.failed]
            upstream = chain[-1] if chain and not ask.failed else None
            if ask.place is not None:
                chain.append(ask.place)
        return msgspec.json.encode(Route(sources=sources, upstream=upstream))


def numbers(*values: int) -> torch.Tensor:
    """Numbers to send, or to receive into: int64."""
    return torch.tensor(values, dtype=torch.int64)


def send_bytes(channel: Channel, data: bytes) -> None:
    """Send bytes whose number the other end knows."""
    if data:
        channel.send(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def receive_bytes(channel: Channel, count: int) -> bytes:
    """Receive so many bytes."""
    received = torch.zeros(count, dtype=torch.uint8)
    channel.receive(received)
    return received.numpy().tobytes()
