"""Communication between the ranks that share a row: keys and values in every layer, and log-probabilities at the end."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


def gather(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Join the parts of all ranks along the first dimension; what each rank does with the whole adds up in the gradient."""
    return _Gather.apply(part, group, False)  # pyright: ignore[reportReturnType]


def gather_outputs(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The same where every rank goes on to compute the very same from the whole: the gradient is known to each, and not added up."""
    return _Gather.apply(part, group, True)  # pyright: ignore[reportReturnType]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup, is_same: bool) -> torch.Tensor:
        ctx.group, ctx.is_same = group, is_same
        whole = part.new_empty(len(part) * group.size(), *part.shape[1:])
        dist.all_gather_single(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        size = len(gradient) // ctx.group.size()
        if ctx.is_same:
            return gradient[ctx.group.rank() * size :][:size].contiguous(), None, None
        part = gradient.new_empty(size, *gradient.shape[1:])
        dist.reduce_scatter_single(part, gradient.contiguous(), group=ctx.group)
        return part, None, None
