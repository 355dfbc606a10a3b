"""What travels from which trainer rank to which engine rank: pieces, cut from the index map, in buckets of bounded bytes.

A *piece* is a part of one tensor that one trainer rank holds and that engine ranks want whole: an overlap of `reshard.index_map`, cut until
it fits a bucket. A trainer rank's weight buffer is its pieces one after the other, those for the same engine ranks together; so a bucket is
a slice of that buffer, and sending it packs nothing. Every piece is sent by one trainer rank alone, and its digest counts once in its
tensor's (`digests`), whoever else holds the same. It all follows from the two layouts, so it is computed once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from pipelinerl.errors import WeightsError
from pipelinerl.messages import Tensor
from pipelinerl.weights.base import itemsize_of
from pipelinerl.weights.reshard import Box, Shards, index_map, whole

BUCKET_BYTES = 16 << 20
"""Most bytes of one send. Larger ones take more memory of every engine rank (two of them); smaller ones cost a round of the event loop."""
ALIGNMENT_BYTES = 16
"""Every piece begins at a multiple of it, which is one of every element's size, too."""

EngineShards = Sequence[Mapping[str, Sequence[Box]]]
"""By rank of an engine: the boxes of each tensor that it holds; several where the checkpoint has fused what the engine cuts apart."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a tensor, sent whole."""

    name: str
    box: Box
    """Within the tensor."""
    is_counted: bool = True
    """Its digest enters the tensor's; the same piece at further ranks does not."""
    first_byte: int = 0
    """Within its bucket, or its rank's weight buffer."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer says of a policy that it is about to send."""

    version: int = -1
    """Negative: it has none to send."""
    pieces: str = ""
    """Digest of the list of pieces, under which the peer publishes that."""
    digests: bytes = b""
    """Of every piece, in the order of the list."""
    changes: tuple[int, ...] = ()
    """Bytes of what changed in each bucket of the list, 0: it is sent whole; empty: all are."""
    base: int = -1
    """The version since which changes are; negative: there are none."""
    parts: tuple[Header, ...] = ()
    """What the trainer's ranks said, whose buckets an engine rank passes on as they came; then the lists and digests are theirs."""


NOTHING = msgspec.msgpack.encode(Header())


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """Pieces that are sent at once."""

    first_byte: int
    """Within the sending rank's weight buffer."""
    num_bytes: int
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """What one trainer rank holds ready, and sends."""

    pieces: tuple[Piece, ...]
    num_bytes: int
    """Of its weight buffer."""
    buckets: tuple[tuple[Bucket, ...], ...]
    """By engine rank, in the order in which they are sent."""


def plan(layout: Iterable[Tensor], *, sources: Shards, targets: EngineShards, bucket_bytes: int = BUCKET_BYTES) -> tuple[SourcePlan, ...]:
    """Plan what each trainer rank sends to the ranks of one engine.

    Raises `WeightsError` naming a tensor of which either side's ranks do not hold every element, or hold boxes that overlap in part.
    """
    layout = tuple(layout)
    tensors = {tensor.name: tensor for tensor in layout if tensor.num_bytes}
    empty = {tensor.name for tensor in layout} - tensors.keys()
    sources = [{name: box for name, box in held.items() if name not in empty} for held in sources]
    targets = [{name: boxes for name, boxes in held.items() if name not in empty} for held in targets]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    places = {name: number for number, name in enumerate(tensors)}
    num_parts = max((len(boxes) for rank in targets for boxes in rank.values()), default=1)
    parts = [
        {name: boxes[part] for name, boxes in rank.items() if part < len(boxes)} for rank in targets for part in range(num_parts)
    ]  # the index map knows one box of a tensor at each end
    try:
        index_map(shapes, sources=parts, targets=[{name: whole(shape) for name, shape in shapes.items()}])
    except WeightsError as error:
        raise WeightsError(f"an engine's ranks, of {len(targets)}, do not hold the model whole and once: {error}") from error
    wanted_by: list[dict[tuple[str, Box], list[int]]] = [{} for _ in sources]
    for move in index_map(shapes, sources=sources, targets=parts):
        box = _moved(sources[move.source][move.name], move.source_slices)
        for part in split(box, most=max(1, bucket_bytes // itemsize_of(tensors[move.name]))):
            wanted_by[move.source].setdefault((move.name, part), []).append(move.target // num_parts)
    counted = _First(), _First()
    return tuple(
        _source_plan(wanted, tensors=tensors, places=places, num_targets=len(targets), bucket_bytes=bucket_bytes, counted=counted)
        for wanted in wanted_by
    )


def split(box: Box, *, most: int) -> Iterator[Box]:
    """Cut a box into boxes of at most so many elements, in the order in which they lie in a tensor."""
    if math.prod(end - first for first, end in box) <= most:
        yield box
        return
    dimension = next(number for number, (first, end) in enumerate(box) if end - first > 1)
    first, end = box[dimension]
    row = math.prod(end - first for first, end in box[dimension + 1 :])
    for start in range(first, end, step := max(1, most // row)):
        part = (*box[:dimension], (start, min(end, start + step)), *box[dimension + 1 :])
        yield from split(part, most=most)


def num_bytes_of(piece: Piece, tensor: Tensor) -> int:
    """Bytes of a piece of this tensor."""
    return math.prod(end - first for first, end in piece.box) * itemsize_of(tensor)


class _First:
    """Tells the first of those that hold the same."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, Box]] = set()

    def __call__(self, key: tuple[str, Box]) -> bool:
        is_first = key not in self._seen
        self._seen.add(key)
        return is_first


def _source_plan(
    wanted: Mapping[tuple[str, Box], list[int]],
    *,
    tensors: Mapping[str, Tensor],
    places: Mapping[str, int],
    num_targets: int,
    bucket_bytes: int,
    counted: tuple[_First, _First],
) -> SourcePlan:
    def order(key: tuple[str, Box]) -> tuple[list[int], int, Box]:
        return sorted(set(wanted[key])), places[key[0]], key[1]

    is_first_source, is_first_target = counted
    pieces: list[Piece] = []
    buckets: list[list[Bucket]] = [[] for _ in range(num_targets)]
    end = 0
    for targets, group in itertools.groupby(sorted(wanted, key=order), key=lambda key: order(key)[0]):
        placed = []
        for name, box in group:
            piece = Piece(name=name, box=box, is_counted=is_first_source((name, box)), first_byte=end)
            end += -(-num_bytes_of(piece, tensors[name]) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            placed.append(piece)
        pieces += placed
        first = {id(piece): is_first_target((piece.name, piece.box)) for piece in placed}
        for filled in _filled(placed, end=end, bucket_bytes=bucket_bytes, tensors=tensors):
            for number, target in enumerate(targets):
                buckets[target].append(_for_target(filled, {one: is_first and not number for one, is_first in first.items()}, tensors))
    for sent in buckets:
        sent.sort(key=lambda bucket: (places[bucket.pieces[0].name], bucket.first_byte))
    return SourcePlan(pieces=tuple(pieces), num_bytes=end, buckets=tuple(tuple(sent) for sent in buckets))


def _filled(pieces: Sequence[Piece], *, end: int, bucket_bytes: int, tensors: Mapping[str, Tensor]) -> Iterator[list[Piece]]:
    """Neighbours, as many as fit one bucket."""
    filled: list[Piece] = []
    for piece in pieces:
        if filled and piece.first_byte + num_bytes_of(piece, tensors[piece.name]) - filled[0].first_byte > bucket_bytes:
            yield filled
            filled = []
        filled.append(piece)
    if filled:
        yield filled


def _for_target(pieces: Sequence[Piece], is_counted: Mapping[int, bool], tensors: Mapping[str, Tensor]) -> Bucket:
    first, last = pieces[0].first_byte, pieces[-1]
    return Bucket(
        first_byte=first,
        num_bytes=last.first_byte + num_bytes_of(last, tensors[last.name]) - first,
        pieces=tuple(
            Piece(name=piece.name, box=piece.box, is_counted=is_counted[id(piece)], first_byte=piece.first_byte - first) for piece in pieces
        ),
    )


def _moved(box: Box, within: tuple[slice, ...]) -> Box:
    return tuple((start + part.start, start + part.stop) for (start, _), part in zip(box, within, strict=True))
