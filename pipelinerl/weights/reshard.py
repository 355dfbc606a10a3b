"""From the shards in which a trainer holds a model to those in which an engine does, with no rank ever holding the whole.

Both sides say which *box* of each tensor every rank holds, in the tensor's own coordinates: a slice per dimension. Where a box of the
trainer's and one of an engine's overlap, the overlap moves, from one rank to the other, and nothing else does. The map depends on the two
layouts alone, so it is computed once; publishing follows it. Values are copied, never computed with: the result is exact bit for bit.

A box is what tensor, pipeline and expert parallelism leave to a rank, also combined, also where one side fuses what the other keeps apart:
a fused parameter is the list of the tensors in it, each with a place in the rank's own memory (`Tensor.offset_bytes` of its layout).
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pipelinerl.errors import WeightsError
from pipelinerl.messages import Tensor

Box = tuple[tuple[int, int], ...]
"""First and one past the last index in every dimension; () for a tensor without dimensions."""
Shapes = Mapping[str, tuple[int, ...]]
Shards = Sequence[Mapping[str, Box]]
"""By rank: the box of each tensor that it holds; tensors it holds nothing of are left out."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One overlap, to be copied from one rank's memory to another's."""

    name: str
    source: int
    """Rank of the trainer."""
    target: int
    """Rank of the engine."""
    source_slices: tuple[slice, ...]
    """Within the source rank's box."""
    target_slices: tuple[slice, ...]
    """Within the target rank's box."""
    num_elements: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rank's part of a checkpoint tensor."""

    box: Box
    """The part, in the checkpoint tensor's coordinates."""
    tensor: Tensor
    """The part as a tensor of its own: its place in the rank's buffer."""


def whole(shape: tuple[int, ...]) -> Box:
    """The box of a tensor that is not cut."""
    return tuple((0, size) for size in shape)


def index_map(shapes: Shapes, *, sources: Shards, targets: Shards) -> list[Move]:
    """Everything that must move so that every target rank has its boxes; what several source ranks hold comes from the least busy one.

    Raises `WeightsError` naming the tensors that the sources do not hold whole, or of which a box lies outside the tensor.
    """
    holders = _holders(shapes, sources)
    check_boxes(shapes, targets, side="an engine's")
    busy: collections.Counter[int] = collections.Counter()
    moves: list[Move] = []
    for target, boxes in enumerate(targets):
        for name, wanted in boxes.items():
            missing = _volume(wanted)
            for held, ranks in holders.get(name, {}).items():
                common = _overlap(held, wanted)
                if common is None:
                    continue
                source = min(ranks, key=lambda rank: (busy[rank], rank))
                count = _volume(common)
                busy[source] += count
                missing -= count
                moves.append(
                    Move(
                        name=name,
                        source=source,
                        target=target,
                        source_slices=_within(common, held),
                        target_slices=_within(common, wanted),
                        num_elements=count,
                    )
                )
            if missing:
                raise WeightsError(
                    f"{name} {list(shapes[name])}: the trainer's ranks hold {_volume(wanted) - missing} of the {_volume(wanted)} elements"
                    f" that rank {target} of the engine wants, {_text(wanted)}; expected all, each once"
                )
    return moves


def check_boxes(shapes: Shapes, shards: Shards, *, side: str) -> None:
    """Raise `WeightsError` for a tensor nobody knows, or a box that is not inside its tensor."""
    for rank, boxes in enumerate(shards):
        for name, box in boxes.items():
            shape = shapes.get(name)
            if shape is None:
                raise WeightsError(f"rank {rank} of {side} ranks holds {name}, and there is no such tensor")
            if len(box) != len(shape) or any(not 0 <= first <= end <= size for (first, end), size in zip(box, shape, strict=True)):
                raise WeightsError(f"{name}: rank {rank} of {side} ranks holds {_text(box)}, which is not inside a tensor of {list(shape)}")


def of_rank(moves: Iterable[Move], *, source: int | None = None, target: int | None = None) -> Iterator[Move]:
    """The moves that a rank takes part in, in the order that both ends of each follow."""
    return (move for move in moves if source in (None, move.source) and target in (None, move.target))


def _holders(shapes: Shapes, sources: Shards) -> dict[str, dict[Box, list[int]]]:
    """Return, by tensor, its distinct boxes and the ranks that hold each; boxes of one tensor overlap only where they are the same."""
    check_boxes(shapes, sources, side="the trainer's")
    found: dict[str, dict[Box, list[int]]] = {name: {} for name in shapes}
    for rank, boxes in enumerate(sources):
        for name, box in boxes.items():
            if _volume(box):
                found[name].setdefault(box, []).append(rank)
    wrong = {name: held for name, shape in shapes.items() if sum(map(_volume, held := found[name])) != math.prod(shape)}
    if wrong:
        name, boxes = next(iter(wrong.items()))
        raise WeightsError(
            f"the trainer's ranks do not hold {len(wrong)} of {len(shapes)} tensors whole and once, for example {name}"
            f" {list(shapes[name])}: got {', '.join(map(_text, boxes)) or 'nothing'}"
        )
    return found


def _overlap(one: Box, other: Box) -> Box | None:
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(first < end for first, end in common) else None


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(first - start, end - start) for (first, end), (start, _) in zip(box, outer, strict=True))


def _volume(box: Box) -> int:
    return math.prod(end - first for first, end in box)


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{first}:{end}" for first, end in box) + "]"
