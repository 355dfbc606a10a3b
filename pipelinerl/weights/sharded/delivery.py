"""How an engine rank's shard arrives: in which buckets, from whom, and where their pieces go.

From the trainer's ranks it comes in their buckets, which take turns; another engine's rank passes on its shard as it lies, or, where what
it took were changes, the trainer's buckets in the order in which it took them. It all follows from lists of pieces, which seldom change.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import msgspec

from pipelinerl.errors import WeightsError
from pipelinerl.weights.manifest import digest_of
from pipelinerl.weights.reshard import Part
from pipelinerl.weights.sharded.digests import NUM_BYTES
from pipelinerl.weights.sharded.plan import Bucket, Header, Piece
from pipelinerl.weights.sharded.spots import Spot, spot_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrival:
    """What one peer sends at once."""

    peer: int
    """Whose list it is in."""
    number: int = 0
    """In that list."""
    num_bytes: int
    spots: tuple[Spot, ...]
    """The pieces that are whole once it is there."""
    first_byte: int | None
    """Where it goes as one run of the shard; None: its pieces lie one after the other, aligned, and are put in their places."""


class Pieces:
    """Those of a rank's shard, in the order in which they are whole when the shard arrives from its first byte on."""

    def __init__(self, spots: Sequence[Spot]) -> None:
        self.spots = tuple(sorted(spots, key=lambda spot: (spot.end_byte, spot.first_byte)))
        self.encoded = msgspec.json.encode([spot.piece for spot in self.spots])
        self.digest = digest_of(self.encoded)
        self.by_first_byte = tuple(sorted(spots, key=lambda spot: spot.first_byte))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The same for every policy from the same peers."""

    lists: tuple[str, ...]
    """By peer: the digest of its list of pieces."""
    spots: tuple[tuple[Spot, ...], ...]
    """By peer, in the order of its list."""
    buckets: tuple[Arrival, ...]
    """In the order in which they are received."""
    pieces: Pieces


def from_trainer(encoded: Sequence[bytes], lists: Sequence[str], *, parts: Mapping[str, Sequence[Part]]) -> Delivery:
    """From the trainer's ranks, which take turns."""
    queues = [
        [
            Arrival(
                peer=peer,
                number=number,
                num_bytes=bucket.num_bytes,
                spots=(spots := tuple(spot_of(piece, parts) for piece in bucket.pieces)),
                first_byte=spots[0].first_byte if len(spots) == 1 and spots[0].is_contiguous else None,
            )
            for number, bucket in enumerate(msgspec.json.decode(one, type=list[Bucket]))
        ]
        for peer, one in enumerate(encoded)
    ]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*queues))
    spots = tuple(tuple(spot for bucket in queue for spot in bucket.spots) for queue in queues)
    return Delivery(
        lists=tuple(lists),
        spots=spots,
        buckets=tuple(bucket for bucket in turns if bucket is not None),
        pieces=Pieces([spot for own in spots for spot in own]),
    )


def from_engine(
    encoded: bytes, lists: Sequence[str], *, parts: Mapping[str, Sequence[Part]], num_bytes: int, bucket_bytes: int
) -> Delivery:
    """From another engine's rank: the shard of so many bytes as it lies there; a piece is whole once its last byte has come."""
    spots = [spot_of(piece, parts) for piece in msgspec.json.decode(encoded, type=list[Piece])]
    waiting = collections.deque(sorted(spots, key=lambda spot: spot.end_byte))
    buckets = []
    for first_byte in range(0, num_bytes, bucket_bytes):
        end_byte = min(num_bytes, first_byte + bucket_bytes)
        whole = []
        while waiting and waiting[0].end_byte <= end_byte:
            whole.append(waiting.popleft())
        buckets.append(Arrival(peer=0, num_bytes=end_byte - first_byte, spots=tuple(whole), first_byte=first_byte))
    return Delivery(lists=tuple(lists), spots=(tuple(spots),), buckets=tuple(buckets), pieces=Pieces(spots))


def proofs_of(delivery: Delivery, headers: Sequence[Header]) -> dict[Spot, bytes]:
    """Every piece's digest, as its peer said it. Raises `WeightsError` where they are not those of the pieces."""
    proofs = {}
    for spots, header in zip(delivery.spots, headers, strict=True):
        if len(header.digests) != NUM_BYTES * len(spots):
            raise WeightsError(f"{len(header.digests)} bytes of digests were offered for {len(spots)} pieces; not taken")
        for number, spot in enumerate(spots):
            proofs[spot] = header.digests[NUM_BYTES * number : NUM_BYTES * (number + 1)]
    return proofs


def sizes_of_changes(delivery: Delivery, headers: Sequence[Header]) -> dict[Arrival, int]:
    """Bytes of the buckets that come as changes."""
    return {
        bucket: size
        for bucket in delivery.buckets
        if bucket.number < len(own := headers[bucket.peer].changes) and (size := own[bucket.number]) > 0
    }
