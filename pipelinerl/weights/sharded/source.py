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
from pipelinerl.weights import manifest
from pipelinerl.weights.point_to_point import DEADLINE_S, Channel, Connect
from pipelinerl.weights.sharded.connections import Ask, Place, Server
from pipelinerl.weights.sharded.digests import add_up, digest_of, seed_of
from pipelinerl.weights.sharded.plan import NOTHING, Header, Piece, SourcePlan, num_bytes_of
from pipelinerl.weights.throttle import throttle


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
    headers: tuple[bytes, ...] = ()
    """What each engine rank is told of the policy in it; none where it holds none."""


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
        self._plan = SourcePlan(pieces=(), num_bytes=0, buckets=())
        self._tensors: dict[str, Tensor] = {}
        self._seeds: tuple[int, ...] = ()
        """Of the digest of each piece."""
        self._lists: tuple[str, ...] = ()
        """By engine rank: the digest under which the list of its buckets is published."""
        self._routes = _Routes()
        self._server = Server(
            connect, who=f"trainer rank {rank}", address=address, deadline_s=deadline_s, words=self._words, send=self._send
        )
        self.place = self._server.place
        self.num_sent = 0
        """Bytes of policies that left so far."""

    def follow(self, plan: SourcePlan, layout: Sequence[Tensor]) -> None:
        """Send by this plan from now on."""
        self._plan, self._tensors = plan, {tensor.name: tensor for tensor in layout}
        self._seeds = tuple(seed_of(piece) for piece in plan.pieces)
        lists = [msgspec.json.encode(buckets) for buckets in plan.buckets]
        self._lists = tuple(manifest.digest_of(encoded) for encoded in lists)
        for digest, encoded in zip(self._lists, lists, strict=True):
            self._server.publish(f"pieces/{digest}", encoded)

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
        held.headers = ()
        for piece, data in self._pieces(held):
            dtype = getattr(torch, self._tensors[piece.name].dtype)
            yield piece, data.view(dtype).view([end - first for first, end in piece.box])

    def seal(self, number: int, version: int) -> dict[str, int]:
        """Make what was written readable as `version`; return this rank's sums (`digests.Sums`)."""
        held = self._held[number]
        found: dict[int, bytes] = {}
        for (piece, data), seed in zip(self._pieces(held), self._seeds, strict=True):
            found[piece.first_byte] = digest_of(data.numpy(), seed=seed)
            throttle()
        held.headers = tuple(
            msgspec.msgpack.encode(
                Header(
                    version=version,
                    pieces=digest,
                    digests=b"".join(found[bucket.first_byte + piece.first_byte] for bucket in buckets for piece in bucket.pieces),
                )
            )
            for digest, buckets in zip(self._lists, self._plan.buckets, strict=True)
        )
        return add_up((piece, found[piece.first_byte]) for piece in self._plan.pieces)

    def offer(self, number: int, encoded: bytes) -> None:
        """Give out this encoded manifest for a weight buffer that all ranks have sealed; rank 0 calls it."""
        self._server.publish(f"manifest/{number}", encoded)
        self._routes.forget(number)

    def close(self) -> None:
        """Hang up on everybody; safe to repeat."""
        self._server.close()

    def _pieces(self, held: _Held) -> Iterator[tuple[Piece, torch.Tensor]]:
        for piece in self._plan.pieces:
            size = num_bytes_of(piece, self._tensors[piece.name])
            yield piece, held.memory[piece.first_byte : piece.first_byte + size]

    def _words(self, ask: Ask) -> bytes:
        if ask.kind == "route":
            return self._routes.answer(ask)
        held = self._held.get(ask.number)
        sends = held is not None and ask.target < len(held.headers) and bool(self._plan.buckets[ask.target])
        return held.headers[ask.target] if held is not None and sends else NOTHING

    def _send(self, ask: Ask, channel: Channel, said: bytes) -> None:
        if said == NOTHING:
            return
        buckets, memory = self._plan.buckets[ask.target], self._held[ask.number].memory
        under_way = [
            channel.begin_send(memory[bucket.first_byte : bucket.first_byte + bucket.num_bytes]) for bucket in buckets
        ]  # all at once: they lie there already, and each is taken when the caller has room for it
        for bucket, sent in zip(buckets, under_way, strict=True):
            sent()
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
