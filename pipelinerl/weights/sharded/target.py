"""An engine rank's end: it takes its own shard of a policy, from the trainer's ranks or from another engine's rank with the same shard.

It holds its shard and two buckets, never more: while one bucket is received, the one before is checked and put in its place. Pieces that
lie in one run in the shard are received there, without a bucket. Every piece must have the digest that its sender took of it, and the sums
of them are what the engine compares with the manifest (`digests`).
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.runtime.network import address_towards
from pipelinerl.weights.base import view_of
from pipelinerl.weights.manifest import Manifest, digest_of, open_manifest
from pipelinerl.weights.point_to_point import DEADLINE_S, Channel, Connect
from pipelinerl.weights.reshard import Part
from pipelinerl.weights.sharded.connections import Ask, Line, Place
from pipelinerl.weights.sharded.digests import NUM_BYTES, add_up, digest_of_piece
from pipelinerl.weights.sharded.plan import BUCKET_BYTES, Bucket, Piece
from pipelinerl.weights.sharded.relay import Arriving, Relay, Spot, spot_of
from pipelinerl.weights.sharded.source import NOTHING, Route, numbers, receive_bytes
from pipelinerl.weights.throttle import throttle

log = logging.getLogger(__name__)

NAME = re.compile(r"sharded\+(gloo|nccl)://([^\s/]+):([0-9]+)/([0-9a-f]{32})/([0-9]+)")


def name_of(place: Place, number: int, *, carrier: str) -> str:
    """The name of a weight buffer: by whom, and where at the trainer's rank 0, it is reached."""
    return f"sharded+{carrier}://{place.address}:{place.port}/{place.token}/{number}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Incoming:
    """A bucket that is under way."""

    place: Place
    channel: Channel
    num_bytes: int
    spots: tuple[Spot, ...]
    digests: tuple[int, ...]


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
        self._buckets: list[torch.Tensor] = []
        self._lists: dict[str, tuple[str, list[tuple[Bucket, tuple[Spot, ...]]]]] = {}
        """By whom they come from: the digest of the list of pieces, and the list."""
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
            size = numbers(0)
            self._line(place).ask(Ask(kind="manifest", number=number))
            channel = self._line(place).begin(size)
            encoded = receive_bytes(channel, int(size))
            channel.send(numbers(0))
        except (RuntimeError, OSError) as error:
            self._line(place).drop()
            raise _lost(place, error) from error
        return open_manifest(encoded, digest=digest, name=f"{place}, number {number}")

    def fetch(self, name: str, shard: torch.Tensor) -> tuple[int, dict[str, int]]:
        """Take this rank's shard of what a weight buffer holds into memory ([bytes] uint8); return its version, and the sums of digests.

        Raises `WeightsError` naming the peer that is gone or silent, or the piece that is damaged; the shard is then worth nothing.
        """
        place, number = self._parse(name)
        relay = self._relay_towards(place)
        relay.withdraw()
        failed: tuple[Place, ...] = ()
        ask = Ask(kind="route", number=number, target=self._rank, layout=self._layout, place=relay.place, policy=digest_of(name.encode()))
        while True:
            try:
                answer = self._line(place).route(msgspec.structs.replace(ask, failed=failed))
            except (RuntimeError, OSError) as error:
                raise _lost(place, error) from error
            route = msgspec.json.decode(answer, type=Route)
            try:
                return self._take(ask, route, shard[: self._num_bytes])
            except WeightsError as error:
                if route.upstream is None:
                    raise
                log.warning("%s takes a policy from the trainer, because another engine did not pass it on: %s", self._who, error)
                failed += (route.upstream,)

    def let_go(self) -> None:
        """Give back the memory of buckets, and pass nothing on any more; the connections stay."""
        self._buckets = []
        if self._relay is not None:
            self._relay.withdraw()

    def close(self) -> None:
        """Hang up on everybody; safe to repeat."""
        for line in self._lines.values():
            line.close()
        if self._relay is not None:
            self._relay.close()

    def _take(self, ask: Ask, route: Route, shard: torch.Tensor) -> tuple[int, dict[str, int]]:
        """Receive everything, and hang up on everybody where anything failed: nobody knows then where a channel stands."""
        assert self._relay is not None
        places = (route.upstream,) if route.upstream is not None else route.sources
        try:
            if route.upstream is not None:
                version, order = self._from_engine(ask, route.upstream, shard)
            else:
                version, order = self._from_trainer(ask, route.sources)
            spots = [spot for incoming in order for spot in incoming.spots]
            digests = [digest for incoming in order for digest in incoming.digests]
            self._check_whole(spots)
            self._relay.begin(Arriving(policy=ask.policy, version=version, memory=shard, spots=spots, digests=digests))
            with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="shards") as thread:
                try:
                    self._receive(order, shard, thread) if route.upstream is None else self._receive_run(order[0], shard, thread)
                except BaseException:
                    self._drop(places)  # at once: the thread waits for one of them
                    raise
            for channel in {id(incoming.channel): incoming.channel for incoming in order}.values():
                channel.send(numbers(0))
        except BaseException as error:
            self._relay.withdraw()
            self._drop(places)
            if isinstance(error, RuntimeError | OSError):
                raise _lost(places[0], error) from error
            raise
        return version, add_up((spot.piece, digest) for spot, digest in zip(spots, digests, strict=True))

    def _from_trainer(self, ask: Ask, sources: Sequence[Place]) -> tuple[int, list[_Incoming]]:
        """Ask every trainer rank; return the version, and the buckets in the order in which they are received.

        The ranks take turns, and each engine rank begins with another one: so no trainer rank is asked by all at once.
        """
        streams: list[list[_Incoming]] = []
        versions: dict[Place, int] = {}
        for place in sources:  # all at once: each answers in a thread of its own
            self._ask(ask, "shard", place)
        for place in _rotated(sources, self._rank):
            versions[place], buckets, channel, digests = self._begin(place, list[Bucket])
            streams.append(
                [
                    _Incoming(
                        place=place,
                        channel=channel,
                        num_bytes=bucket.num_bytes,
                        spots=spots,
                        digests=tuple(itertools.islice(digests, len(spots))),
                    )
                    for bucket, spots in buckets
                ]
            )
        if len(set(versions.values())) > 1:
            raise WeightsError(f"the trainer's ranks hold different policies: {', '.join(f'{who}: {v}' for who, v in versions.items())}")
        turns = itertools.chain.from_iterable(itertools.zip_longest(*streams))
        return next(iter(versions.values())), [incoming for incoming in turns if incoming is not None]

    def _from_engine(self, ask: Ask, upstream: Place, shard: torch.Tensor) -> tuple[int, list[_Incoming]]:
        self._ask(ask, "relay", upstream)
        version, buckets, channel, digests = self._begin(upstream, list[Piece])
        ((_, spots),) = buckets
        return version, [_Incoming(place=upstream, channel=channel, num_bytes=len(shard), spots=spots, digests=tuple(digests))]

    def _ask(self, ask: Ask, kind: Literal["shard", "relay"], place: Place) -> None:
        known, _ = self._lists.get(place.who, ("", []))
        try:
            self._line(place).ask(msgspec.structs.replace(ask, kind=kind, known=known))
        except (RuntimeError, OSError) as error:
            raise _lost(place, error) from error

    def _begin(self, place: Place, kind: type) -> tuple[int, list[tuple[Bucket, tuple[Spot, ...]]], Channel, Iterator[int]]:
        """What one peer answers: the version, its buckets (an engine rank's: all in one), its channel, every piece's digest."""
        _, buckets = self._lists.get(place.who, ("", []))
        header = numbers(0, 0)
        try:
            channel = self._line(place).begin(header)
            version, size = header.tolist()
            if version == NOTHING:
                raise WeightsError(f"cannot fetch a policy from {place}: its weight buffer holds none; not taken")
            if size:
                encoded = receive_bytes(channel, size)
                found = msgspec.json.decode(encoded, type=kind)
                if kind == list[Piece]:
                    found = [Bucket(first_byte=0, num_bytes=0, pieces=tuple(found))]
                buckets = [(bucket, tuple(spot_of(piece, self._parts) for piece in bucket.pieces)) for bucket in found]
                self._lists[place.who] = digest_of(encoded), buckets
            received = receive_bytes(channel, NUM_BYTES * sum(len(spots) for _, spots in buckets))
        except (RuntimeError, OSError) as error:
            raise _lost(place, error) from error
        digests = (int.from_bytes(received[start : start + NUM_BYTES], "little") for start in range(0, len(received), NUM_BYTES))
        return version, buckets, channel, digests

    def _receive(self, order: Sequence[_Incoming], shard: torch.Tensor, thread: concurrent.futures.Executor) -> None:
        """Receive buckets one after the other, each while the one before is put in its place."""
        under_way: collections.deque[tuple[concurrent.futures.Future[None], _Incoming, torch.Tensor]] = collections.deque()
        for number, incoming in enumerate(order):
            if len(under_way) == 2:
                self._put(*under_way.popleft(), shard)
            into = self._memory_for(incoming, shard, number=number)
            under_way.append((thread.submit(incoming.channel.receive, into), incoming, into))
        while under_way:
            self._put(*under_way.popleft(), shard)

    def _memory_for(self, incoming: _Incoming, shard: torch.Tensor, *, number: int) -> torch.Tensor:
        """The place in the shard itself, where the bucket is one run of it; else one of two buckets."""
        if len(incoming.spots) == 1 and incoming.spots[0].is_contiguous:
            return shard[incoming.spots[0].first_byte : incoming.spots[0].end_byte]
        if not self._buckets:
            self._buckets = [torch.empty(self._bucket_bytes, dtype=torch.uint8) for _ in range(2)]
        if incoming.num_bytes > self._bucket_bytes:
            raise WeightsError(
                f"{incoming.place} sends a bucket of {incoming.num_bytes} bytes, this rank has {self._bucket_bytes} for one; not taken"
            )
        return self._buckets[number % 2][: incoming.num_bytes]

    def _put(self, received: concurrent.futures.Future[None], incoming: _Incoming, memory: torch.Tensor, shard: torch.Tensor) -> None:
        try:
            received.result()
        except (RuntimeError, OSError) as error:
            raise _lost(incoming.place, error) from error
        assert self._relay is not None
        is_there = len(incoming.spots) == 1 and incoming.spots[0].is_contiguous
        for spot, digest in zip(incoming.spots, incoming.digests, strict=True):
            first = 0 if is_there else spot.piece.first_byte
            data = memory[first : first + spot.num_bytes]
            _check(spot, data, digest, place=incoming.place)
            if not is_there:
                view = view_of(shard, spot.part.tensor)[spot.slices]
                view.copy_(data.view(view.dtype).view(view.shape))
            self._relay.arrived(spot)
            throttle()

    def _receive_run(self, incoming: _Incoming, shard: torch.Tensor, thread: concurrent.futures.Executor) -> None:
        """Receive the shard as it lies at another engine's rank; check each piece once its last byte is there."""
        assert self._relay is not None
        digests = {id(spot): digest for spot, digest in zip(incoming.spots, incoming.digests, strict=True)}
        waiting = collections.deque(sorted(incoming.spots, key=lambda spot: spot.end_byte))
        parts = shard.split(self._bucket_bytes)
        under_way = collections.deque(thread.submit(incoming.channel.receive, part) for part in parts)
        num_there = 0
        for part in parts:
            try:
                under_way.popleft().result()
            except (RuntimeError, OSError) as error:
                raise _lost(incoming.place, error) from error
            num_there += len(part)
            while waiting and waiting[0].end_byte <= num_there:
                spot = waiting.popleft()
                data = view_of(shard, spot.part.tensor)[spot.slices].contiguous().view(-1).view(torch.uint8)
                _check(spot, data, digests[id(spot)], place=incoming.place)
                self._relay.arrived(spot)
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

    def _drop(self, places: Sequence[Place]) -> None:
        for place in places:
            self._line(place).drop()

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


def _check(spot: Spot, data: torch.Tensor, digest: int, *, place: Place) -> None:
    if (found := digest_of_piece(spot.piece, data)) != digest:
        raise WeightsError(
            f"{spot.piece.name} {spot.piece.box} from {place}: digest is {found:032x}, published was {digest:032x}; not taken"
        )


def _lost(place: Place, error: Exception) -> WeightsError:
    reason = str(error).partition("\n")[0].replace(place.token, "...")
    return WeightsError(f"cannot fetch a policy from {place}: {reason}; not taken")


def _rotated(places: Sequence[Place], by: int) -> list[Place]:
    by %= max(1, len(places))
    return [*places[by:], *places[:by]]
