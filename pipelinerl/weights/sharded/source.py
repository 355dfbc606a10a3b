"""A trainer rank's end: it holds its pieces of policies ready, and sends each engine rank those that it needs.

Rank 0 also has the manifest, and says to each engine rank from whom to take a policy: the first to ask for one takes it from the trainer's
ranks, the next from the engine rank that asked before it, and so on. So a policy leaves the trainer once, however many engines there are,
and every engine rank passes its shard on once at most. Changes do the same, from one engine rank to the next that can use them.
Whoever could not get it from an engine takes it from the trainer.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import torch

from pipelinerl.messages import Tensor
from pipelinerl.weights import manifest
from pipelinerl.weights.point_to_point import DEADLINE_S, Channel, Connect
from pipelinerl.weights.sharded.changes import Changes
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
    version: int = -1
    base: int | None = None
    """The version since which `changes` are; None: there are none."""
    changes: Mapping[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Encoded, by the first byte of the bucket; the others are sent whole."""
    headers_of_changes: tuple[bytes, ...] = ()
    """What an engine rank is told that takes those."""

    def leads_from(self, held: int) -> bool:
        """Tell whether the changes lead to the policy from a version."""
        return self.base is not None and self.base <= held <= self.version


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
        self._changes: Changes | None = None
        """None where policies are sent whole."""
        self._routes = _Routes()
        self._server = Server(
            connect, who=f"trainer rank {rank}", address=address, deadline_s=deadline_s, words=self._words, send=self._send
        )
        self.place = self._server.place
        self.num_sent = 0
        """Bytes of policies that left so far, or are leaving."""

    def follow(self, plan: SourcePlan, layout: Sequence[Tensor], *, sends_changes: bool = False) -> None:
        """Send by this plan from now on; `sends_changes`: what changed, to engine ranks that can use it."""
        self._plan, self._tensors = plan, {tensor.name: tensor for tensor in layout}
        self._changes = Changes(plan, self._tensors) if sends_changes else None
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
        held.headers, held.base = (), None
        for piece, data in self._pieces(held):
            dtype = getattr(torch, self._tensors[piece.name].dtype)
            yield piece, data.view(dtype).view([end - first for first, end in piece.box])

    def forget_changes(self) -> None:
        """Send the next policy whole to everybody: versions go back."""
        if self._changes is not None:
            self._changes.forget()

    def seal(self, number: int, version: int, *, base: int | None = None) -> dict[str, int]:
        """Make what was written readable as `version`; return this rank's sums (`digests.Sums`).

        `base`: the oldest version that any engine holds; None where one needs a whole policy.
        """
        held = self._held[number]
        found: dict[int, bytes] = {}
        for (piece, data), seed in zip(self._pieces(held), self._seeds, strict=True):
            found[piece.first_byte] = digest_of(data.numpy(), seed=seed)
            throttle()
        headers = [
            Header(
                version=version,
                pieces=digest,
                digests=b"".join(found[bucket.first_byte + piece.first_byte] for bucket in buckets for piece in bucket.pieces),
            )
            for digest, buckets in zip(self._lists, self._plan.buckets, strict=True)
        ]
        held.headers, held.version = tuple(map(msgspec.msgpack.encode, headers)), version
        if self._changes is not None:
            changes = self._changes.since(base, version=version, memory=held.memory)
            held.changes = {first: torch.frombuffer(bytearray(encoded), dtype=torch.uint8) for first, encoded in changes.items()}
            sizes = [tuple(len(changes.get(bucket.first_byte, b"")) for bucket in buckets) for buckets in self._plan.buckets]
            held.headers_of_changes = tuple(
                msgspec.msgpack.encode(msgspec.structs.replace(header, changes=own, base=-1 if base is None else base))
                for header, own in zip(headers, sizes, strict=True)
            )
            held.base = base if changes else None
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
        held = self._held.get(ask.number)
        if ask.kind == "route":
            return self._routes.answer(ask, takes_changes=held is not None and held.leads_from(ask.held))
        if held is None or ask.target >= len(held.headers) or not self._plan.buckets[ask.target]:
            return NOTHING
        return (held.headers_of_changes if held.leads_from(ask.held) else held.headers)[ask.target]

    def _send(self, ask: Ask, channel: Channel, said: bytes) -> None:
        if said == NOTHING:
            return
        held = self._held[ask.number]
        changes = held.changes if held.leads_from(ask.held) else {}
        parts = [
            changes.get(bucket.first_byte, held.memory[bucket.first_byte : bucket.first_byte + bucket.num_bytes])
            for bucket in self._plan.buckets[ask.target]
        ]
        # All at once: they lie there already, and each is taken when the caller has room for it.
        sends = [channel.begin_send(part) for part in parts]
        self.num_sent += sum(map(len, parts))  # before the caller has them: whoever has all of it can count
        for sent in sends:
            sent()


class _Routes:
    """Who takes a policy from whom. A rule: no socket, no clock."""

    def __init__(self) -> None:
        self.sources: tuple[tuple[Place, ...], ...] = ()
        """By engine rank."""
        self._chains: dict[tuple[int, int, str], list[tuple[Place, bool]]] = {}
        """Engine ranks that asked for a policy, in that order, and whether they take changes, by (weight buffer, rank, layout)."""
        self._lock = threading.Lock()

    def forget(self, number: int) -> None:
        """Begin anew for a weight buffer: it holds another policy."""
        with self._lock:
            self._chains = {key: chain for key, chain in self._chains.items() if key[0] != number}

    def answer(self, ask: Ask, *, takes_changes: bool = False) -> bytes:
        """`takes_changes`: only an engine rank that takes changes, too, can pass them on; it can pass on the whole as well."""
        sources = self.sources[ask.target] if ask.target < len(self.sources) else ()
        with self._lock:
            chain = self._chains.setdefault((ask.number, ask.target, ask.layout), [])
            chain[:] = [(place, has_changes) for place, has_changes in chain if place != ask.place and place not in ask.failed]
            able = [place for place, has_changes in chain if has_changes or not takes_changes]
            upstream = able[-1] if able and not ask.failed else None
            if ask.place is not None:
                chain.append((ask.place, takes_changes))
        return msgspec.json.encode(Route(sources=sources, upstream=upstream))
