"""Counts the collectives of a rank, by kind and number of ranks: of a real one as of one that is pretended."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KINDS = {
    "all_gather": ("_allgather_base_", "all_gather_into_tensor", "allgather_"),
    "reduce_scatter": ("_reduce_scatter_base_", "reduce_scatter_tensor"),
    "all_reduce": ("allreduce_", "all_reduce", "all_reduce_"),
    "all_to_all": ("alltoall_base_", "all_to_all_single"),
    "broadcast": ("broadcast_",),
    "send": ("send",),
    "receive": ("recv_",),
}
"""Kinds of collectives, by torch's names in `c10d` and `_c10d_functional`."""
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}


@dataclasses.dataclass(slots=True)
class Collective:
    """All calls of one kind in groups of one size."""

    calls: int = 0
    bytes: int = 0
    """Of the larger of what goes in and what comes out, as NCCL's own tests count them."""


class Collectives(TorchDispatchMode):
    """Counts what passes through torch.distributed while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[str, int], Collective] = {}
        """By kind and number of ranks."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kind = kind_of(func)
        if kind is not None:
            sizes = [leaf.numel() * leaf.element_size() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            of_kind = self.found.setdefault((kind, _num_ranks(args)), Collective())
            of_kind.calls += 1
            of_kind.bytes += max(sizes, default=0)
        return func(*args, **(kwargs or {}))


def kind_of(func: Any) -> str | None:
    """The kind of collective that an operator of torch is; None for any other."""
    return _KIND_OF.get(func._opname) if func.namespace in ("c10d", "_c10d_functional") else None


def _num_ranks(args: Sequence[Any]) -> int:
    """Count the ranks of the group among a collective's arguments."""
    for given in args:
        if isinstance(given, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):  # the operation of a reduction is such an object, too
                return dist.ProcessGroup.unbox(given).size()
        if isinstance(given, str) and given in c10d._world.pg_names.values():
            return c10d._resolve_process_group(c10d.GroupName(given)).size()
    return 0
