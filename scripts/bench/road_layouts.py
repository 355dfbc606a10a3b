"""Layouts of a model over ranks, for the bench of the transport from shard to shard: which box of each tensor every rank holds."""

from __future__ import annotations

import dataclasses
import math

from pipelinerl.messages import Tensor
from pipelinerl.weights.reshard import Box, whole

HIDDEN, NUM_LAYERS, NUM_EXPERTS = 512, 8, 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Ranks of one copy of a model: `fsdp` fastest, then `tensor`, `expert`, `pipeline`."""

    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    pipeline: int = 1

    @property
    def num_ranks(self) -> int:
        return self.fsdp * self.tensor * self.expert * self.pipeline

    def __str__(self) -> str:
        sizes = {"FSDP": self.fsdp, "TP": self.tensor, "EP": self.expert, "PP": self.pipeline}
        return " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "1 rank"


def layout_of(num_bytes: int) -> tuple[Tensor, ...]:
    """A mixture of experts in bfloat16 of about so many bytes: attention, norms, a dense and an expert block for each layer."""
    width = max(64, round(num_bytes / 2 / NUM_LAYERS / HIDDEN / (4 * 8) / 64) * 64)  # of a block; 32 widths of columns for each layer
    shapes: dict[str, tuple[int, ...]] = {"embed": (8 * width, HIDDEN), "head": (8 * width, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(NUM_LAYERS):
        shapes |= {f"{layer}.q": (2 * width, HIDDEN), f"{layer}.o": (HIDDEN, 2 * width), f"{layer}.norm": (HIDDEN,)}
        shapes |= {f"{layer}.up": (4 * width, HIDDEN), f"{layer}.down": (HIDDEN, 4 * width)}
        shapes |= {f"{layer}.experts.up": (NUM_EXPERTS, width, HIDDEN), f"{layer}.experts.down": (NUM_EXPERTS, HIDDEN, width)}
    placed, end = [], 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        placed.append(Tensor(name=name, shape=shape, dtype="bfloat16", offset_bytes=end, num_bytes=size))
        end += size
    return tuple(placed)


def shards_of(layout: tuple[Tensor, ...], grid: Grid) -> list[dict[str, Box]]:
    """By rank: the box of each tensor that it holds."""
    shards: list[dict[str, Box]] = []
    for rank in range(grid.num_ranks):
        part, rest = rank % grid.fsdp, rank // grid.fsdp
        tensor, rest = rest % grid.tensor, rest // grid.tensor
        expert, stage = rest % grid.expert, rest // grid.expert
        held: dict[str, Box] = {}
        for one in layout:
            layer, _, rest_of_name = one.name.partition(".")
            home = int(layer) * grid.pipeline // NUM_LAYERS if rest_of_name else (0 if layer == "embed" else grid.pipeline - 1)
            if home != stage:
                continue
            box = whole(tuple(one.shape))
            if "experts" in one.name:
                box = _cut(box, dimension=0, part=expert, parts=grid.expert)
            if len(one.shape) > 1:
                by_column = one.name.rpartition(".")[2] in ("o", "down")
                box = _cut(box, dimension=len(box) - (1 if by_column else 2), part=tensor, parts=grid.tensor)
            box = _cut(box, dimension=0, part=part, parts=grid.fsdp)
            if all(end > first for first, end in box):
                held[one.name] = box
        shards.append(held)
    return shards


def _cut(box: Box, *, dimension: int, part: int, parts: int) -> Box:
    """The `part`-th of `parts` slices of a box, as FSDP cuts: all of the same size but the last ones."""
    first, end = box[dimension]
    size = -(-(end - first) // parts)
    return (*box[:dimension], (min(end, first + part * size), min(end, first + (part + 1) * size)), *box[dimension + 1 :])
