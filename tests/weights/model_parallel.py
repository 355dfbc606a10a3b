"""How tensor, pipeline and expert parallelism cut a model: the shards of every rank, as trainers and engines hold them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pipelinerl.weights.reshard import Box, Shapes, whole


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Ranks of one copy of a model: `tensor` fastest, then `expert`, then `pipeline`."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.expert


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How one tensor is cut."""

    dimension: int | None = None
    """Along which tensor parallelism cuts it; None: every rank has all of it."""
    parts: int | None = None
    """Into how many parts at most: heads of keys, of which several ranks may share one."""
    layer: int | None = None
    """The layer it belongs to; None: the stage said by `stage`."""
    stage: int = 0
    """Of a tensor outside the layers: 0 the first, -1 the last."""
    experts: int | None = None
    """Dimension of a tensor of all experts along which expert parallelism cuts; None: it is no expert's."""
    expert: tuple[int, int] | None = None
    """(number, count) of a tensor that is one expert's alone: it lies on one rank along `expert`."""


def shards_of(shapes: Shapes, *, grid: Grid, cuts: Callable[[str], Cut], num_layers: int) -> list[dict[str, Box]]:
    """By rank: the boxes it holds. Parts must be equal."""
    assert not num_layers % grid.pipeline
    shards: list[dict[str, Box]] = [{} for _ in range(grid.ranks)]
    for rank in range(grid.ranks):
        tensor, expert, stage = rank % grid.tensor, rank // grid.tensor % grid.expert, rank // (grid.tensor * grid.expert)
        for name, shape in shapes.items():
            how = cuts(name)
            home = how.stage % grid.pipeline if how.layer is None else how.layer * grid.pipeline // num_layers
            if home != stage or not _is_here(how, expert=expert, grid=grid):
                continue
            box = whole(shape)
            if how.experts is not None:
                box = cut(box, dimension=how.experts, part=expert, parts=grid.expert)
            if how.dimension is not None:
                parts = min(grid.tensor, how.parts or grid.tensor)
                box = cut(box, dimension=how.dimension, part=tensor * parts // grid.tensor, parts=parts)
            shards[rank][name] = box
    return shards


def _is_here(how: Cut, *, expert: int, grid: Grid) -> bool:
    if how.expert is None:
        return True
    number, count = how.expert
    assert not count % grid.expert
    return number * grid.expert // count == expert


def cut(box: Box, *, dimension: int, part: int, parts: int) -> Box:
    """The `part`-th of `parts` equal slices of a box."""
    first, end = box[dimension]
    size, rest = divmod(end - first, parts)
    assert not rest
    return (*box[:dimension], (first + part * size, first + (part + 1) * size), *box[dimension + 1 :])
