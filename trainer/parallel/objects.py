"""Objects that ranks take from each other: plans and outcomes of checkpoints. Never code.

torch.distributed sends objects as pickles, and gloo and NCCL authenticate nobody: who took a rank's place while connections are made could
otherwise run what they like in all the others. Tensors are tensors; everything else goes through here.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import traceback
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from pipelinerl.errors import WireError

_PLAN_MODULES = tuple(f"torch.distributed.checkpoint.{name}" for name in ("api", "filesystem", "metadata", "planner", "storage"))
_PLAIN = (pathlib.PosixPath, torch.Size, traceback.StackSummary, traceback.FrameSummary)


def refuse_foreign_objects() -> None:
    """Have every object that a collective of this process receives refused that is not one of a checkpoint's. May be called again."""
    c10d._unpickler = PlainUnpickler


def gathered(value: Any, *, group: dist.ProcessGroup | None, device: torch.device | None = None) -> list[Any]:
    """Return what every rank of a group gives, by rank; plain JSON values, which travel as bytes. Every rank calls this.

    `device`: where the group's collectives take tensors from; default: the host, as gloo's do.
    """
    frame = torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8).to(device or "cpu")
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(frame)], device=device), group=group)
    frames = [torch.zeros(int(max(sizes)), dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(frames, torch.nn.functional.pad(frame, (0, len(frames[0]) - len(frame))), group=group)
    return [msgspec.json.decode(other[: int(size)].cpu().numpy().tobytes()) for other, size in zip(frames, sizes, strict=True)]


class PlainUnpickler(c10d._unpickler):
    """Takes data classes and enumerations of checkpoint plans, and errors; of everything else `load` raises `WireError`."""

    def find_class(self, module: str, name: str, /) -> Any:
        # By the plain name only: a dotted one would lead through a class to whatever the module has imported.
        found = super().find_class(module, name) if "." not in name and _may_be_looked_at(module) else None
        if not _is_plain(found, module):
            raise WireError(
                f"a rank sent an object of {module}.{name}, which is not a checkpoint's: refused; another process took its place"
            )
        return found


def _may_be_looked_at(module: str) -> bool:
    """Looking a name up imports its module: only what this process has imported anyway."""
    return module in (*_PLAN_MODULES, "builtins", "torch", "torch.serialization", "pipelinerl.errors") or module in {
        one.__module__ for one in _PLAIN
    }


def _is_plain(found: Any, module: str) -> bool:
    if isinstance(found, torch.dtype) or found in _PLAIN or found is torch.serialization._get_layout:
        return True
    if not isinstance(found, type) or found.__module__ != module:
        return False
    is_plan = module in _PLAN_MODULES and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum))
    return is_plan or issubclass(found, Exception)
