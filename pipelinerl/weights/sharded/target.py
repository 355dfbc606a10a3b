"""An engine rank's end: it takes its own shard of a policy, from the trainer's ranks or from another engine's rank with the same shard.

It holds its shard and room for two buckets, never more: while some arrive, those before are checked and put in their places. Pieces that
lie in one run in the shard are received there, and need no room. Every piece must have the digest that its sender took of it, and the
sums of them are what the engine compares with the manifest (`digests`).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import torch

from pipelinerl.errors import PeerError, WeightsError
from pipelinerl.runtime.network import address_towards
from pipelinerl.weights.manifest import Manifest, digest_of, open_manifest
from pipelinerl.weights.point_to_point import DEADLINE_S, Channel, Connect
from pipelinerl.weights.reshard import Part
from pipelinerl.weights.sharded import digests
from pipelinerl.weights.sharded.changes import Bases
from pipelinerl.weights.sharded.connections import Ask, Line, Place
from pipelinerl.weights.sharded.digests import NUM_BYTES, add_up
from pipelinerl.weights.sharded.plan import BUCKET_BYTES, Bucket, Header, Piece
from pipelinerl.weights.sharded.relay import Arriving, Bytes, Pieces, Relay, Spot, spot_of
from pipelinerl.weights.sharded.ring import Ring
from pipelinerl.weights.sharded.source import Route
from pipelinerl.weights.throttle import throttle

log = logging.getLogger(__name__)

Save = Callable[[torch.Tensor], object]
"""Writes the shard in force into memory ([bytes] uint8)."""
NAME = re.compile(r"sharded\+(gloo|nccl)://([^\s/]+):([0-9]+)/([0-9a-f]{32})/([0-9]+)")


def name_of(place: Place, number: int, *, carrier: str) -> str:
    """The name of a weight buffer: by whom, and where at the trainer's rank 0, it is reached."""
    return f"sharded+{carrier}://{place.address}:{place.port}/{place.token}/{number}"


class _Lost(WeightsError):
    """A peer is gone or silent, or has no policy."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Bucket:
    """What one peer sends at once."""

    peer: int
    """Which one, of those that send."""
    number: int = 0
    """In its list."""
    num_bytes: int
    spots: tuple[Spot, ...]
    """The pieces that are whole once it is there."""
    first_byte: int | None
    """Where it goes as one run of the shard; None: its pieces lie one after the other, aligned, and are put in their places."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Delivery:
    """How a shard arrives: the same for every policy from the same peers."""

    lists: tuple[str, ...]
    """By peer: the digest of its list of pieces."""
    spots: tuple[tuple[Spot, ...], ...]
    """By peer, in the order of its list."""
    buckets: tuple[_Bucket, ...]
    """In the order in which they are received."""
    pieces: Pieces


class ShardTarget:
    """One engine rank's connections, buckets and relay."""

    def __init__(
        self,
        connect: Callable[[str], Connect],
        *,
        rank: int,
        parts: Mapping[str, Sequence[Part]],
        who: str = "an engine",
        deadline_s: float = DEADLINE_S,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`connect` makes the way to connect to one peer over "gloo" or "nccl"; `parts` are what this rank holds, by tensor, and where in
        its shard.
        """
        self._connect = connect
        self._carrier = "gloo"
        """The one that the trainer has chosen."""
        self._rank = rank
        self._parts = parts
        self._who = f"{who}, rank {rank}"
        self._deadline_s = deadline_s
        self._bucket_bytes = bucket_bytes
        self._layout = digest_of(msgspec.json.encode([[(part.box, part.tensor) for part in parts[name]] for name in sorted(parts)]))
        self._num_bytes = max((part.tensor.offset_bytes + part.tensor.num_bytes for held in parts.values() for part in held), default=0)
        self._room: Ring | None = None
        """Of two buckets, once needed."""
        self._version = -1
        """Of the policy taken last."""
        self._bases = Bases(lambda name: parts[name][0].tensor)
        self._deliveries: dict[bool, _Delivery] = {}
        """From the trainer's ranks, and from another engine's."""
        self._lines: dict[str, Line] = {}
        self._relay: Relay | None = None

    @property
    def num_relayed(self) -> int:
        """Bytes of policies that this rank passed on so far."""
        return 0 if self._relay is None else self._relay.num_sent

    def manifest(self, name: str, digest: str) -> Manifest:
        """Fetch the manifest of a weight buffer. Raises `WeightsError` unless it is the one that was announced."""
        place, number = self._parse(name)
        try:
            encoded = self._line(place).get(f"manifest/{number}")
        except PeerError as error:
            raise _lost(place, error) from error
        return open_manifest(encoded, digest=digest, name=f"{place}, number {number}")

    def fetch(self, name: str, shard: torch.Tensor, *, save: Save | None = None) -> tuple[int, dict[str, int]]:
        """Take this rank's shard of what a weight buffer holds into memory ([bytes] uint8); return its version, and the sums of digests.

        With `save` changes are taken where there are some, over the shard in force; where they do not lead to the policy, all of it is.

        Raises `WeightsError` naming the peer that is gone or silent, or the piece that is damaged; the shard is then worth nothing.
        """
        place, number = self._parse(name)
        relay = self._relay_towards(place)
        relay.withdraw()
        failed: tuple[Place, ...] = ()
        ask = Ask(kind="route", number=number, target=self._rank, layout=self._layout, place=relay.place, policy=digest_of(name.encode()))
        held = self._version if save is not None else -1
        while True:
            ask = msgspec.structs.replace(ask, failed=failed, held=held)
            try:
                answer = self._line(place).route(ask)
            except PeerError as error:
                raise _lost(place, error) from error
            route = msgspec.json.decode(answer, type=Route)
            try:
                self._version, sums = self._take(ask, route, shard[: self._num_bytes], save=save)
                return self._version, sums
            except WeightsError as error:
                if route.upstream is None and (held < 0 or isinstance(error, _Lost)):
                    raise
                if route.upstream is None:
                    log.warning("%s takes a policy whole, because changes did not lead to it: %s", self._who, error)
                    held = -1
                    continue
                log.warning("%s takes a policy from the trainer, because another engine did not pass it on: %s", self._who, error)
                failed += (route.upstream,)

    def close(self) -> None:
        """Hang up on everybody; safe to repeat."""
        for line in self._lines.values():
            line.close()
        if self._relay is not None:
            self._relay.close()

    def _take(self, ask: Ask, route: Route, shard: torch.Tensor, *, save: Save | None) -> tuple[int, dict[str, int]]:
        """Receive everything, and hang up on everybody where anything failed: nobody knows then where a channel stands."""
        assert self._relay is not None
        peers = _rotated(route.sources, self._rank) if route.upstream is None else [route.upstream]
        try:
            answers = self._ask(ask, peers)
            version, *others = {header.version for header, _ in answers}
            if others:
                held = ", ".join(f"{peer}: {header.version}" for peer, (header, _) in zip(peers, answers, strict=True))
                raise WeightsError(f"the trainer's ranks hold different policies: {held}")
            delivery = self._delivery(peers, [header.pieces for header, _ in answers], is_relayed=route.upstream is not None)
            proofs = _proofs(delivery, [header for header, _ in answers])
            changes = _sizes_of_changes(delivery, [header for header, _ in answers])
            if changes and save is not None:
                save(shard)
            self._relay.begin(Arriving(policy=ask.policy, version=version, memory=shard, pieces=delivery.pieces, digests=proofs))
            self._receive(delivery, [channel for _, channel in answers], peers, proofs, shard, changes=changes)
        except BaseException as error:
            self._relay.withdraw()
            for peer in peers:
                self._line(peer).drop()
            if isinstance(error, RuntimeError | OSError):
                raise _lost(peers[0], error) from error
            raise
        return version, add_up((spot.piece, proof) for spot, proof in proofs.items())

    def _ask(self, ask: Ask, peers: Sequence[Place]) -> list[tuple[Header, Channel]]:
        """Ask all at once; return what each says, and its channel."""
        answers = []
        peer = peers[0]
        try:
            for peer in peers:
                self._line(peer).ask(msgspec.structs.replace(ask, kind="policy", place=None))
            for peer in peers:
                words, channel = self._line(peer).answer()
                answers.append((header := msgspec.msgpack.decode(words, type=Header), channel))
                if header.version < 0:
                    raise _Lost(f"cannot fetch a policy from {peer}: its weight buffer holds none; not taken")
        except (RuntimeError, OSError, PeerError) as error:
            raise _lost(peer, error) from error
        return answers

    def _delivery(self, peers: Sequence[Place], lists: Sequence[str], *, is_relayed: bool) -> _Delivery:
        """How the pieces of these lists arrive; lists that were not there the last time are fetched."""
        known = self._deliveries.get(is_relayed)
        if known is None or known.lists != tuple(lists):
            encoded = []
            for peer, digest in zip(peers, lists, strict=True):
                try:
                    encoded.append(self._line(peer).get(f"pieces/{digest}"))
                except PeerError as error:
                    raise _lost(peer, error) from error
            known = self._deliveries[is_relayed] = self._relayed(encoded, lists) if is_relayed else self._sent(encoded, lists)
            self._check_whole(known.pieces.spots)
        return known

    def _sent(self, encoded: Sequence[bytes], lists: Sequence[str]) -> _Delivery:
        """From the trainer's ranks, which take turns. Each engine rank begins with another one, so that none is asked by all at once."""
        queues = [
            [
                _Bucket(
                    peer=peer,
                    number=number,
                    num_bytes=bucket.num_bytes,
                    spots=(spots := tuple(spot_of(piece, self._parts) for piece in bucket.pieces)),
                    first_byte=spots[0].first_byte if len(spots) == 1 and spots[0].is_contiguous else None,
                )
                for number, bucket in enumerate(msgspec.json.decode(one, type=list[Bucket]))
            ]
            for peer, one in enumerate(encoded)
        ]
        turns = itertools.chain.from_iterable(itertools.zip_longest(*queues))
        spots = tuple(tuple(spot for bucket in queue for spot in bucket.spots) for queue in queues)
        return _Delivery(
            lists=tuple(lists),
            spots=spots,
            buckets=tuple(bucket for bucket in turns if bucket is not None),
            pieces=Pieces([spot for own in spots for spot in own]),
        )

    def _relayed(self, encoded: Sequence[bytes], lists: Sequence[str]) -> _Delivery:
        """From another engine's rank: the shard as it lies there; a piece is whole once its last byte has come."""
        spots = [spot_of(piece, self._parts) for piece in msgspec.json.decode(encoded[0], type=list[Piece])]
        waiting = collections.deque(sorted(spots, key=lambda spot: spot.end_byte))
        buckets = []
        for first_byte in range(0, self._num_bytes, self._bucket_bytes):
            end_byte = min(self._num_bytes, first_byte + self._bucket_bytes)
            whole = []
            while waiting and waiting[0].end_byte <= end_byte:
                whole.append(waiting.popleft())
            buckets.append(_Bucket(peer=0, num_bytes=end_byte - first_byte, spots=tuple(whole), first_byte=first_byte))
        return _Delivery(lists=tuple(lists), spots=(tuple(spots),), buckets=tuple(buckets), pieces=Pieces(spots))

    def _receive(
        self,
        delivery: _Delivery,
        channels: Sequence[Channel],
        peers: Sequence[Place],
        proofs: Mapping[Spot, bytes],
        shard: torch.Tensor,
        *,
        changes: Mapping[_Bucket, int],
    ) -> None:
        """Receive buckets, as many at once as there is room for, each while those before are checked and put in their places.

        `changes`: bytes of those that come as changes of what the shard holds.
        """
        under_way: collections.deque[tuple[_Bucket, torch.Tensor, Callable[[], None]]] = collections.deque()

        def finish() -> None:
            bucket, memory, wait = under_way.popleft()
            try:
                wait()
            except (RuntimeError, OSError) as error:
                raise _lost(peers[bucket.peer], error) from error
            is_in_place = bucket.first_byte is not None and bucket not in changes
            received = self._bases.with_changes(memory, bucket.spots, shard) if bucket in changes else memory
            self._put(bucket.spots, None if is_in_place else received.numpy(), proofs, shard.numpy(), peer=peers[bucket.peer])
            if not is_in_place:
                room.give_back()

        room = self._room = self._room or Ring(2 * self._bucket_bytes)
        room.clear()
        for bucket in delivery.buckets:
            while (memory := self._memory_for(bucket, shard, room, num_bytes=changes.get(bucket))) is None:
                if not under_way:
                    peer, size = peers[bucket.peer], changes.get(bucket, bucket.num_bytes)
                    raise WeightsError(f"{peer} sends {size} bytes at once, this rank has room for {len(room.memory)}; not taken")
                finish()
            under_way.append((bucket, memory, channels[bucket.peer].begin_receive(memory)))
        while under_way:
            finish()

    def _memory_for(self, bucket: _Bucket, shard: torch.Tensor, room: Ring, *, num_bytes: int | None) -> torch.Tensor | None:
        """The place in the shard itself, where the bucket is one run of it; else, or for `num_bytes` of changes, some room, if there is."""
        if bucket.first_byte is not None and num_bytes is None:
            return shard[bucket.first_byte : bucket.first_byte + bucket.num_bytes]
        return room.take(bucket.num_bytes if num_bytes is None else num_bytes)

    def _put(self, spots: Sequence[Spot], bucket: Bytes | None, proofs: Mapping[Spot, bytes], shard: Bytes, *, peer: Place) -> None:
        """Check the pieces of a bucket, put them in their places, where they are not there already (None), and let them be passed on."""
        assert self._relay is not None
        for spot in spots:
            place = spot.within(shard)
            first = spot.piece.first_byte
            data = np.ascontiguousarray(place) if bucket is None else bucket[first : first + spot.num_bytes]
            if (found := digests.digest_of(data, seed=spot.seed)) != proofs[spot]:
                what = f"{spot.piece.name} {spot.piece.box} from {peer}"
                raise WeightsError(f"{what}: digest is {found.hex()}, published was {proofs[spot].hex()}; not taken")
            if bucket is not None:
                place[...] = data.reshape(spot.shape)
        self._relay.arrived(spots)
        throttle()

    def _check_whole(self, spots: Sequence[Spot]) -> None:
        """Raise `WeightsError` unless the pieces make up every part, each once."""
        sizes: collections.Counter[str] = collections.Counter()
        for name, box in {(spot.piece.name, spot.piece.box) for spot in spots}:
            sizes[name] += math.prod(end - first for first, end in box)
        for name, held in self._parts.items():
            expected = sum(math.prod(part.tensor.shape) for part in held)
            if sizes[name] != expected:
                raise WeightsError(f"{name}: {sizes[name]} of the {expected} elements that {self._who} holds were offered; not taken")

    def _parse(self, name: str) -> tuple[Place, int]:
        """Raises `WeightsError` for what is no name of a weight buffer of this transport."""
        if (match := NAME.fullmatch(name)) is None:
            raise WeightsError(f"{name!r} is not the name of a weight buffer: expected sharded+gloo://<address>:<port>/<token>/<number>")
        self._carrier = match[1]
        return Place(who="trainer rank 0", address=match[2], port=int(match[3]), token=match[4]), int(match[5])

    def _line(self, place: Place) -> Line:
        """The line to a peer; one to what was there under the same name before is closed."""
        line = self._lines.get(place.who)
        if line is None or line.place != place:
            if line is not None:
                line.close()
            line = self._lines[place.who] = Line(place, self._connect(self._carrier), deadline_s=self._deadline_s)
        return line

    def _relay_towards(self, place: Place) -> Relay:
        if self._relay is None:
            self._relay = Relay(
                self._connect(self._carrier),
                who=self._who,
                address=address_towards(place.address, place.port),
                deadline_s=self._deadline_s,
                bucket_bytes=self._bucket_bytes,
            )
        return self._relay


def _proofs(delivery: _Delivery, headers: Sequence[Header]) -> dict[Spot, bytes]:
    """Every piece's digest, as its peer said it."""
    proofs = {}
    for spots, header in zip(delivery.spots, headers, strict=True):
        if len(header.digests) != NUM_BYTES * len(spots):
            raise WeightsError(f"{len(header.digests)} bytes of digests were offered for {len(spots)} pieces; not taken")
        for number, spot in enumerate(spots):
            proofs[spot] = header.digests[NUM_BYTES * number : NUM_BYTES * (number + 1)]
    return proofs


def _sizes_of_changes(delivery: _Delivery, headers: Sequence[Header]) -> dict[_Bucket, int]:
    """Bytes of the buckets that come as changes."""
    return {
        bucket: size
        for bucket in delivery.buckets
        if bucket.number < len(own := headers[bucket.peer].changes) and (size := own[bucket.number]) > 0
    }


def _lost(place: Place, error: Exception) -> WeightsError:
    reason = str(error).partition("\n")[0].replace(place.token, "...")
    return _Lost(f"cannot fetch a policy from {place}: {reason}; not taken")


def _rotated(places: Sequence[Place], by: int) -> list[Place]:
    by %= max(1, len(places))
    return [*places[by:], *places[:by]]
