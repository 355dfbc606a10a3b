"""The layout of a policy in the sections that the ranks of an engine hold: one buffer, of which each rank's parameters are plain views.

Where engines and trainer take turns on the same devices, engines read the weights where they are trained. An engine of one rank has a
layout of whole tensors for that; the ranks of a larger one hold boxes of them, so each has a section of the buffer, laid out as its
parameters are. A rank of the trainer that holds the same box trains it there, and no byte of it is ever copied; what the two cut
differently is copied, once for each policy, by the index map.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Collection, Mapping, Sequence

import msgspec

from pipelinerl.errors import WeightsError
from pipelinerl.messages import Shards, Tensor
from pipelinerl.weights.base import num_bytes
from pipelinerl.weights.reshard import Box, Move, Part, Shapes, check_boxes, index_map

Boxes = Mapping[str, Box]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a checkpoint tensor in the section of a rank."""

    name: str
    """The checkpoint tensor's."""
    rank: int
    """Of the engine."""
    number: int
    """Of the boxes of this tensor that the rank holds."""
    box: Box

    @property
    def published(self) -> str:
        """Its name in the layout."""
        return f"{self.name}@{self.rank}.{self.number}"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(end - first for first, end in self.box)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box, in the whole tensor."""
        return tuple(slice(first, end) for first, end in self.box)


def sections_of(parts: Sequence[Mapping[str, Sequence[Part]]]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Lay the sections of ranks one after another: the layout of the whole buffer, and the first byte of each section.

    `parts` are the parts of each rank, in a buffer of its own.
    """
    layout: list[Tensor] = []
    starts: list[int] = []
    for rank, by_name in enumerate(parts):
        starts.append(-(-num_bytes(layout) // mmap.PAGESIZE) * mmap.PAGESIZE)
        for name, own in by_name.items():
            for number, part in enumerate(own):
                piece = Piece(name=name, rank=rank, number=number, box=part.box)
                offset = part.tensor.offset_bytes + starts[-1]
                layout.append(msgspec.structs.replace(part.tensor, name=piece.published, offset_bytes=offset))
    return tuple(layout), tuple(starts)


def pieces_in(layout: Collection[Tensor], shards: Shards, shapes: Shapes, *, optional: Collection[str] = ()) -> dict[str, Piece]:
    """Return the pieces that a layout is made of, by their names in it; none where `shards` is empty.

    `shards` are the boxes of each rank, `shapes` those of the trainer's tensors. Raises `WeightsError` where they do not fit each other;
    `optional` tensors may be left out.
    """
    pieces = [
        Piece(name=name, rank=rank, number=number, box=box)
        for rank, by_name in enumerate(shards)
        for name, boxes in by_name.items()
        for number, box in enumerate(boxes)
    ]
    if not pieces:
        return {}
    check_boxes(shapes, [{piece.name: piece.box} for piece in pieces], side="an engine's")
    if missing := sorted(shapes.keys() - {piece.name for piece in pieces} - set(optional)):
        raise WeightsError(
            f"the engines' ranks hold nothing of {len(missing)} tensors, for example {missing[0]}: load the same model folder"
        )
    found = {piece.published: piece for piece in pieces}
    placed = {tensor.name: tuple(tensor.shape) for tensor in layout}
    expected = {name: piece.shape for name, piece in found.items()}
    if placed != expected:
        wrong = min(name for name in placed.keys() | expected.keys() if placed.get(name) != expected.get(name))
        raise WeightsError(f"the engines' layout has {wrong} as {placed.get(wrong)}, and their ranks hold it as {expected.get(wrong)}")
    return found


def moves_into(pieces: Mapping[str, Piece], shapes: Shapes, held: Sequence[Boxes]) -> list[tuple[str, Move]]:
    """Return what ranks of the trainer write, and into which piece; `held` are their boxes.

    A rank that holds the very box of a piece writes it, and can have it lie there: so each of its boxes is one piece's at most. Everything
    else is by the index map. Raises `WeightsError` as that does.
    """
    found: list[tuple[str, Move]] = []
    taken: set[tuple[int, str]] = set()
    rest: list[Piece] = []
    for piece in pieces.values():
        ranks = [rank for rank, boxes in enumerate(held) if boxes.get(piece.name) == piece.box and (rank, piece.name) not in taken]
        if not ranks:
            rest.append(piece)
            continue
        source = ranks[0]
        taken.add((source, piece.name))
        every = tuple(slice(0, size) for size in piece.shape)
        count = math.prod(piece.shape)
        move = Move(name=piece.name, source=source, target=piece.rank, source_slices=every, target_slices=every, num_elements=count)
        found.append((piece.published, move))
    for piece in rest:
        one = {piece.name: shapes[piece.name]}
        sources = [{piece.name: boxes[piece.name]} if piece.name in boxes else {} for boxes in held]
        found += [(piece.published, move) for move in index_map(one, sources=sources, targets=[{piece.name: piece.box}])]
    return found
