"""Where this rank's piece of a tensor lies in the whole of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from pipelinerl.weights.reshard import Box, whole
from trainer.parallel.sharding import whole_of

_PACKED = {"packed_colwise": -2, "packed_rowwise": -1}
"""Styles of transformers' plans for two matrices in one, and the dimension along which they are packed."""


def box_of(tensor: torch.Tensor | None, shape: tuple[int, ...]) -> Box:
    """The box of the whole that this rank holds; an empty one where it holds none, or not one box."""
    if tensor is None:
        return tuple((0, 0) for _ in shape)
    if not isinstance(tensor, DTensor):
        return whole(shape)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(sizes) != tuple(tensor.to_local().shape):
        return tuple((0, 0) for _ in shape)
    return tuple((offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def placed(piece: torch.Tensor, *, like: torch.Tensor, packed: int | None = None) -> torch.Tensor:
    """Give a `piece` that is spread `like` another tensor: the same memory, at its place in the whole.

    With `packed` two matrices lie along that dimension in one tensor, of each of which a rank has a part: no box in the whole. The tensor
    then has one dimension more there, 2 long.
    """
    split = None if packed is None else like.ndim + packed
    view = piece if split is None else piece.unflatten(split, (2, -1))
    if not isinstance(like, DTensor):
        return view
    shape, placements = list(like.shape), list(like.placements)
    if split is not None:
        shape[split : split + 1] = [2, shape[split] // 2]
        placements = [_beside(placement, split=split, num_dimensions=like.ndim) for placement in placements]
    return whole_of(view, mesh=like.device_mesh, placements=placements, shape=shape)


def packed_dimensions(module: PreTrainedModel) -> Callable[[str], int | None]:
    """Return a function from a parameter's name to the dimension along which two are packed in it, or None."""
    module.init_parallel_plans()
    plan = {name: _PACKED[style] for name, style in module.tp_plan.items() if style in _PACKED}
    patterns = [(re.compile(re.escape(name).replace(r"\*", r"\d+")), dimension) for name, dimension in plan.items()]
    return lambda name: next((dimension for pattern, dimension in patterns if pattern.fullmatch(name)), None)


def _beside(placement: Any, *, split: int, num_dimensions: int) -> Any:
    """A placement after dimension `split` has become two: 2 matrices, which no rank parts, and the dimension of each."""
    if placement.is_replicate() or placement.dim % num_dimensions < split:
        return placement
    return Shard(placement.dim % num_dimensions + 1)
