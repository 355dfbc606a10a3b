"""A policy in sections, one for each rank of an engine: its layout, and who writes what of it; by hand."""

from __future__ import annotations

import mmap

import pytest

from pipelinerl.errors import WeightsError
from pipelinerl.messages import Tensor
from pipelinerl.weights.reshard import Box, Part
from pipelinerl.weights.sections import moves_into, pieces_in, sections_of

SHAPES = {"column": (4, 2), "row": (2, 4), "norm": (2,)}
TOP, BOTTOM = ((0, 2), (0, 2)), ((2, 4), (0, 2))
LEFT, RIGHT = ((0, 2), (0, 2)), ((0, 2), (2, 4))
NORM = ((0, 2),)
SHARDS = (
    {"column": (TOP,), "row": (LEFT,), "norm": (NORM,)},
    {"column": (BOTTOM,), "row": (RIGHT,), "norm": (NORM,)},
)
"""Of an engine of two ranks: a matrix cut by rows, one by columns, and a norm that both have."""


def part(name: str, box: Box, *, offset_bytes: int) -> Part:
    shape = tuple(end - first for first, end in box)
    size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
    return Part(box=box, tensor=Tensor(name=name, shape=shape, dtype="float32", offset_bytes=offset_bytes, num_bytes=size))


LAYOUT, STARTS = sections_of(
    [{name: [part(name, boxes[0], offset_bytes=16 * place)] for place, (name, boxes) in enumerate(boxes_of.items())} for boxes_of in SHARDS]
)


def who_writes(held: list[dict[str, Box]]) -> dict[str, list[tuple[int, int]]]:
    """By piece: the rank of the trainer, and how many elements."""
    found: dict[str, list[tuple[int, int]]] = {}
    for name, move in moves_into(pieces_in(LAYOUT, SHARDS, SHAPES), SHAPES, held):
        found.setdefault(name, []).append((move.source, move.num_elements))
    return found


def test_each_rank_has_a_section_laid_out_as_its_parameters_are():
    assert STARTS == (0, mmap.PAGESIZE)
    places = {tensor.name: (tensor.offset_bytes, tensor.shape) for tensor in LAYOUT}
    assert places["column@0.0"] == (0, (2, 2))
    assert places["row@1.0"] == (mmap.PAGESIZE + 16, (2, 2))
    assert places["norm@1.0"] == (mmap.PAGESIZE + 32, (2,))


def test_ranks_that_are_cut_alike_write_each_its_own_section_and_nothing_twice():
    held: list[dict[str, Box]] = [{name: boxes[0] for name, boxes in shard.items()} for shard in SHARDS]
    assert who_writes(held) == {
        "column@0.0": [(0, 4)],
        "row@0.0": [(0, 4)],
        "norm@0.0": [(0, 2)],
        "column@1.0": [(1, 4)],
        "row@1.0": [(1, 4)],
        "norm@1.0": [(1, 2)],
    }


def test_what_the_two_cut_differently_is_put_together_by_the_index_map():
    """Fully sharded: every tensor in two by its first dimension."""
    held: list[dict[str, Box]] = [
        {"column": TOP, "row": ((0, 1), (0, 4)), "norm": ((0, 1),)},
        {"column": BOTTOM, "row": ((1, 2), (0, 4)), "norm": ((1, 2),)},
    ]
    assert who_writes(held) == {
        "column@0.0": [(0, 4)],
        "column@1.0": [(1, 4)],
        "row@0.0": [(0, 2), (1, 2)],
        "row@1.0": [(0, 2), (1, 2)],
        "norm@0.0": [(0, 1), (1, 1)],
        "norm@1.0": [(0, 1), (1, 1)],
    }


def test_one_rank_that_holds_everything_writes_everything():
    held: list[dict[str, Box]] = [{"column": ((0, 4), (0, 2)), "row": ((0, 2), (0, 4)), "norm": NORM}]
    assert {rank for writers in who_writes(held).values() for rank, _ in writers} == {0}


def test_a_layout_that_is_not_that_of_the_ranks_is_refused():
    with pytest.raises(WeightsError, match="nothing of 1 tensors, for example bias"):
        pieces_in(LAYOUT, SHARDS, SHAPES | {"bias": (2,)})
    assert pieces_in(LAYOUT, SHARDS, SHAPES | {"bias": (2,)}, optional={"bias"})
    with pytest.raises(WeightsError, match="not inside a tensor"):
        pieces_in(LAYOUT, SHARDS, SHAPES | {"column": (3, 2)})
    with pytest.raises(WeightsError, match=r"norm@1\.0 as None"):
        pieces_in(LAYOUT[:-1], SHARDS, SHAPES)
