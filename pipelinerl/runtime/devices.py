"""The NVIDIA GPUs of this machine, as NVML tells them: without CUDA, which must not be entered before a fork, and without torch.

A GPU is known by its UUID wherever processes speak of it: an index means another one in each process that sees other GPUs, or sees them in
another order. Indices are what a person writes; they are those of `nvidia-smi`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pynvml

from pipelinerl.errors import ConfigError
from pipelinerl.runtime.machine import say_bytes

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as it is at the time of asking."""

    index: int
    """As `nvidia-smi` counts."""
    uuid: str
    """As CUDA_VISIBLE_DEVICES takes it: `GPU-...`."""
    name: str
    total_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        return f"{self.index} {self.name} ({say_bytes(self.total_bytes)}, {self.uuid})"


def found_gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process may use, in the order in which it sees them; none without NVIDIA's driver."""
    with contextlib.suppress(pynvml.NVMLError), _nvml():
        gpus = [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
        if (visible := os.environ.get(VISIBLE)) is None:
            return tuple(gpus)
        chosen = ([gpu for gpu in gpus if _is_meant(gpu, name.strip())] for name in visible.split(","))
        return tuple(found[0] for found in chosen if found)
    return ()


def usable_gpus() -> tuple[Gpu, ...]:
    """The GPUs that processes of a run would take: `found_gpus`, and none where torch is a build for CPUs."""
    try:
        is_for_cpus = version("torch").endswith("+cpu")
    except PackageNotFoundError:
        is_for_cpus = False
    return () if is_for_cpus else found_gpus()


def named(names: Sequence[int | str], gpus: Sequence[Gpu], *, key: str, is_alone: bool = True) -> list[Gpu]:
    """The GPUs of these indices or UUIDs, in this order; `key` is where they stand in the settings.

    `is_alone`: there is no other machine on which a UUID might be. Raises `ConfigError` for one that is not there, or is named twice.
    """
    found: list[Gpu] = []
    for name in names:
        meant = [gpu for gpu in gpus if _is_meant(gpu, str(name))]
        if not meant and not is_alone and not str(name).isdecimal():
            continue
        if len(meant) != 1:
            raise ConfigError(f"{key} names GPU {name}, which is {'not one GPU' if meant else 'not'} among those found here: {said(gpus)}")
        if meant[0] in found:
            raise ConfigError(f"{key} names GPU {meant[0]} twice: ranks of one model need a GPU each. Name it once")
        found += meant
    return found


def said(gpus: Sequence[Gpu]) -> str:
    """GPUs for a person."""
    return ", ".join(map(str, gpus)) or "none"


def show_first(own: str) -> None:
    """Have CUDA count this process's own GPUs (UUIDs, joined by commas) first, and behind them the others that it may use.

    The others stay visible, so that memory which a process of another GPU shares can be opened. To be called before CUDA is entered.
    """
    uuids = own.split(",")
    os.environ[VISIBLE] = ",".join((*uuids, *(gpu.uuid for gpu in found_gpus() if gpu.uuid not in uuids)))


@contextlib.contextmanager
def _nvml() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory: Any = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
    )


def _is_meant(gpu: Gpu, name: str) -> bool:
    """An index, or a UUID or its beginning, as CUDA takes them."""
    return gpu.index == int(name) if name.isdecimal() else bool(name) and gpu.uuid.startswith(name)
