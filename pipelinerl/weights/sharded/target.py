"""An engine rank's end: it takes its own shard of a policy, from the trainer's ranks or from another engine's rank with the same shard.

It holds its shard and room for two buckets, never more: while some arrive, those before are checked and put in their places. Pieces that
lie in one run in the shard are received there, and need no room. Every piece must have the digest that its sender took of it, and the
sums of them are what the engine compares with the manifest (`digests`).
"""

from __future__ import annotations

import collections
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
from pipelinerl.weights.sharded.delivery import Arrival, Delivery, from_engine, from_trainer, proofs_of, sizes_of_changes
from pipelinerl.weights.sharded.digests import add_up
from pipelinerl.weights.sharded.plan import BUCKET_BYTES, Header
from pipelinerl.weights.sharded.relay import Arriving, Relay
from pipelinerl.weights.sharded.ring import Ring
from pipelinerl.weights.sharded.source import Route
from pipelinerl.weights.sharded.spots import Bytes, Spot
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
        self._deliveries: dict[bool, Delivery] = {}
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
                if held >= 0 and not isinstance(error, _Lost):
                    log.warning("%s takes a policy whole, because changes did not lead to it: %s", self._who, error)
                    held = -1
                    continue
                if route.upstream is None:
                    raise
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
        sources = _rotated(route.sources, self._rank)  # each begins with another one, so that none is asked by all at once
        peers = sources if route.upstream is None else [route.upstream]
        try:
            answers = self._ask(ask, peers)
            headers, channels, senders = tuple(header for header, _ in answers), [channel for _, channel in answers], peers
            if parts := headers[0].parts if route.upstream is not None else ():  # buckets of all the trainer's ranks, over the one channel
                headers, channels, senders = parts, channels * len(parts), peers * len(parts)
                if len(parts) != len(sources):
                    raise WeightsError(f"{peers[0]} passes on what {len(parts)} trainer ranks sent, expected {len(sources)}; not taken")
            version, *others = {header.version for header in headers}
            if others:
                held = ", ".join(f"{peer}: {header.version}" for peer, header in zip(senders, headers, strict=True))
                raise WeightsError(f"the trainer's ranks hold different policies: {held}")
            is_relayed = route.upstream is not None and not parts
            delivery = self._delivery(peers if is_relayed else sources, [header.pieces for header in headers], is_relayed=is_relayed)
            proofs = proofs_of(delivery, headers)
            changes = sizes_of_changes(delivery, headers)
            if changes and save is not None:
                save(shard)
            self._relay.begin(
                Arriving(
                    policy=ask.policy,
                    version=version,
                    memory=shard,
                    delivery=delivery,
                    digests=proofs,
                    headers=headers if changes else (),
                )
            )
            self._receive(delivery, channels, senders, proofs, shard, changes=changes)
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

    def _delivery(self, peers: Sequence[Place], lists: Sequence[str], *, is_relayed: bool) -> Delivery:
        """How the pieces of these lists arrive; lists that were not there the last time are fetched."""
        known = self._deliveries.get(is_relayed)
        if known is None or known.lists != tuple(lists):
            encoded = []
            for peer, digest in zip(peers, lists, strict=True):
                try:
                    encoded.append(self._line(peer).get(f"pieces/{digest}"))
                except PeerError as error:
                    raise _lost(peer, error) from error
            known = self._deliveries[is_relayed] = (
                from_engine(encoded[0], lists, parts=self._parts, num_bytes=self._num_bytes, bucket_bytes=self._bucket_bytes)
                if is_relayed
                else from_trainer(encoded, lists, parts=self._parts)
            )
            self._check_whole(known.pieces.spots)
        return known

    def _receive(
        self,
        delivery: Delivery,
        channels: Sequence[Channel],
        peers: Sequence[Place],
        proofs: Mapping[Spot, bytes],
        shard: torch.Tensor,
        *,
        changes: Mapping[Arrival, int],
    ) -> None:
        """Receive buckets, as many at once as there is room for, each while those before are checked and put in their places.

        `changes`: bytes of those that come as changes of what the shard holds.
        """
        under_way: collections.deque[tuple[Arrival, torch.Tensor, Callable[[], None]]] = collections.deque()

        def finish() -> None:
            bucket, memory, wait = under_way.popleft()
            try:
                wait()
            except (RuntimeError, OSError) as error:
                raise _lost(peers[bucket.peer], error) from error
            is_in_place = bucket.first_byte is not None and bucket not in changes
            received = self._bases.with_changes(memory, bucket.spots, shard) if bucket in changes else memory
            self._put(bucket.spots, None if is_in_place else received.numpy(), proofs, shard.numpy(), peer=peers[bucket.peer])
            assert self._relay is not None
            self._relay.arrived(bucket, memory.clone() if bucket in changes else None)
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

    def _memory_for(self, bucket: Arrival, shard: torch.Tensor, room: Ring, *, num_bytes: int | None) -> torch.Tensor | None:
        """The place in the shard itself, where the bucket is one run of it; else, or for `num_bytes` of changes, some room, if there is."""
        if bucket.first_byte is not None and num_bytes is None:
            return shard[bucket.first_byte : bucket.first_byte + bucket.num_bytes]
        return room.take(bucket.num_bytes if num_bytes is None else num_bytes)

    def _put(self, spots: Sequence[Spot], bucket: Bytes | None, proofs: Mapping[Spot, bytes], shard: Bytes, *, peer: Place) -> None:
        """Check the pieces of a bucket, and put them in their places, where they are not there already (None)."""
        for spot in spots:
            place = spot.within(shard)
            first = spot.piece.first_byte
            data = np.ascontiguousarray(place) if bucket is None else bucket[first : first + spot.num_bytes]
            if (found := digests.digest_of(data, seed=spot.seed)) != proofs[spot]:
                what = f"{spot.piece.name} {spot.piece.box} from {peer}"
                raise WeightsError(f"{what}: digest is {found.hex()}, published was {proofs[spot].hex()}; not taken")
            if bucket is not None:
                place[...] = data.reshape(spot.shape)
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


def _lost(place: Place, error: Exception) -> WeightsError:
    reason = str(error).partition("\n")[0].replace(place.token, "...")
    return _Lost(f"cannot fetch a policy from {place}: {reason}; not taken")


def _rotated(places: Sequence[Place], by: int) -> list[Place]:
    by %= max(1, len(places))
    return [*places[by:], *places[:by]]
