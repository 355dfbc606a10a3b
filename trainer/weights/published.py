"""Where published tensors lie in the module's own: engines name experts one by one, and the trainer holds those of a layer in one tensor.

What transformers does between the two (`revert_weight_conversion`) is tried on a small tensor whose elements are numbered, with as many
experts as the real one has. Where a published tensor turns out to be one box of it, the same box, as many times larger, is that of the real
one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from pipelinerl.weights.reshard import Box

SMALL = 8
"""Indices of every dimension but the first in the small tensor: a power of two, so that halves and quarters of it are whole."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a published tensor is cut from."""

    name: str
    """The module's tensor."""
    box: Box
    """Within that, in all of its dimensions."""
    num_left_out: int = 0
    """The first dimensions, 1 long in the box, that the published tensor has not."""

    def inner(self, held: Box) -> Box:
        """What somebody who holds this box of the module's tensor has of the published one; empty where nothing."""
        overlap = [(max(first, start), min(end, stop)) for (first, end), (start, stop) in zip(held, self.box, strict=True)]
        if any(end <= first for first, end in overlap):
            return tuple((0, 0) for _ in self.box[self.num_left_out :])
        kept = list(zip(overlap, self.box, strict=True))[self.num_left_out :]
        return tuple((first - start, end - start) for (first, end), (start, _) in kept)

    def outer(self, piece: Box) -> Box:
        """A box of the published tensor as one of the module's."""
        moved = [(first + start, end + start) for (first, end), (start, _) in zip(piece, self.box[self.num_left_out :], strict=True)]
        return (*self.box[: self.num_left_out], *moved)


def origins_in(module: PreTrainedModel, name: str, shape: tuple[int, ...]) -> dict[str, Origin]:
    """The published tensors of a tensor of the module, by name; without those that are no box of it."""
    small = tuple(SMALL if number and size > SMALL and size % SMALL == 0 else size for number, size in enumerate(shape))
    numbered = torch.arange(math.prod(small)).view(small)
    real: Any = torch.empty(shape, device="meta")
    real_shapes = {published: tuple(tensor.shape) for published, tensor in revert_weight_conversion(module, {name: real}).items()}
    found = {}
    for published, tensor in revert_weight_conversion(module, {name: numbered}).items():
        first, last = (torch.unravel_index(end, small) for end in (tensor.min(), tensor.max()))
        box = tuple((int(start), int(end) + 1) for start, end in zip(first, last, strict=True))
        within = numbered[tuple(slice(start, end) for start, end in box)]
        num_left_out = within.ndim - tensor.ndim
        scaled = tuple((start * one // other, end * one // other) for (start, end), one, other in zip(box, shape, small, strict=True))
        sizes = tuple(end - start for start, end in scaled)
        is_box = within.shape[num_left_out:] == tensor.shape and torch.equal(within.reshape(tensor.shape), tensor)
        if is_box and sizes[num_left_out:] == real_shapes[published]:
            found[published] = Origin(name=name, box=scaled, num_left_out=num_left_out)
    return found
