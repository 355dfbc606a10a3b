"""The layout of a published policy: which tensor lies where in one flat buffer of bytes.

The engines choose the layout (`messages.Tensor`, one per parameter) and the trainer writes exactly it. Both sides read it through
`views`, so there is one piece of offset arithmetic. A layout comes off the wire: it is checked before a byte is touched.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Collection, Iterable, Mapping

import torch

from pipelinerl.errors import WeightsError
from pipelinerl.messages import Tensor

ALIGNMENT_BYTES = 64
"""Tensors planned by `plan_layout` start at multiples of it: one cache line, and enough for every vector load."""


def plan_layout(tensors: Mapping[str, torch.Tensor]) -> tuple[Tensor, ...]:
    """Lay tensors one after another, aligned, in the order given; each keeps its shape and dtype."""
    placed: list[Tensor] = []
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        placed.append(Tensor(name=name, shape=tuple(tensor.shape), dtype=dtype, offset_bytes=offset, num_bytes=size))
        offset += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(placed)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Size of the smallest buffer that holds the layout."""
    return max((tensor.offset_bytes + tensor.num_bytes for tensor in tensors), default=0)


def views(buffer: torch.Tensor, tensors: Iterable[Tensor]) -> dict[str, torch.Tensor]:
    """Give each tensor of the layout as a view into `buffer` ([bytes] uint8); nothing is copied. Raises `WeightsError` where it cannot."""
    found: dict[str, torch.Tensor] = {}
    for tensor in tensors:
        if problem := _problem_of(tensor):
            raise WeightsError(problem)
        found[tensor.name] = view_of(buffer, tensor)
    return found


def view_of(buffer: torch.Tensor, tensor: Tensor) -> torch.Tensor:
    """Give one tensor as a view into `buffer`, as `views` does."""
    return buffer[place_of(tensor, within=len(buffer))].view(_dtype_of(tensor)).view(tensor.shape)


def place_of(tensor: Tensor, *, within: int) -> slice:
    """The bytes of a tensor in a buffer of so many. Raises `WeightsError` where that ends before them."""
    end = tensor.offset_bytes + tensor.num_bytes
    if end > within:
        raise WeightsError(f"{tensor.name} ends at byte {end}, but the buffer has {within}: it was made for another layout")
    return slice(tensor.offset_bytes, end)


def check_layout(shapes: Mapping[str, tuple[int, ...]], tensors: Collection[Tensor], *, optional: Collection[str] = ()) -> None:
    """Raise `WeightsError` with everything that keeps `tensors` from holding a model whose parameters have these `shapes`."""
    problems = layout_problems(shapes, tensors, optional=optional)
    if problems:
        raise WeightsError(
            f"the engines' layout does not fit the trainer's model, {len(problems)} problems:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
            + "\nBoth must have loaded the same model folder; an engine that fuses or renames parameters must undo it in its layout."
        )


def layout_problems(shapes: Mapping[str, tuple[int, ...]], tensors: Collection[Tensor], *, optional: Collection[str] = ()) -> list[str]:
    """Say everything by which `tensors` is not a layout of parameters with these `shapes`; nothing where it is one.

    `optional` names may be left out: tied parameters, which hold the same numbers as another one.
    """
    counts = collections.Counter(tensor.name for tensor in tensors)
    problems = [f"missing: {name} {list(shape)}" for name, shape in shapes.items() if name not in counts and name not in optional]
    problems += [f"extra: {tensor.name} {list(tensor.shape)}: no such parameter" for tensor in tensors if tensor.name not in shapes]
    problems += [
        f"misshapen: {tensor.name} is {list(tensor.shape)} in the layout and {list(shapes[tensor.name])} in the model"
        for tensor in tensors
        if tensor.name in shapes and tuple(tensor.shape) != tuple(shapes[tensor.name])
    ]
    problems += [f"twice: {name}" for name in sorted(name for name, count in counts.items() if count > 1)]
    problems += [problem for tensor in tensors if (problem := _problem_of(tensor))]
    return problems + _overlaps(tensors)


def itemsize_of(tensor: Tensor) -> int:
    """Bytes of one element."""
    return _dtype_of(tensor).itemsize


def _problem_of(tensor: Tensor) -> str:
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        return f"{tensor.name}: {tensor.dtype!r} is not a torch dtype"
    size = math.prod(tensor.shape) * dtype.itemsize
    if size != tensor.num_bytes or min(tensor.shape, default=0) < 0:
        return f"{tensor.name}: {list(tensor.shape)} of {tensor.dtype} is {size} bytes, but the layout says {tensor.num_bytes}"
    if tensor.offset_bytes < 0 or tensor.offset_bytes % dtype.itemsize:
        return f"{tensor.name}: offset {tensor.offset_bytes} is not a multiple of the {dtype.itemsize} bytes of a {tensor.dtype}"
    return ""


def _dtype_of(tensor: Tensor) -> torch.dtype:
    return getattr(torch, tensor.dtype)


def _overlaps(tensors: Iterable[Tensor]) -> list[str]:
    placed = sorted((tensor for tensor in tensors if tensor.num_bytes), key=lambda tensor: tensor.offset_bytes)
    return [
        f"overlap: {after.name} starts at byte {after.offset_bytes}, inside {before.name}"
        for before, after in itertools.pairwise(placed)
        if before.offset_bytes + before.num_bytes > after.offset_bytes
    ]
