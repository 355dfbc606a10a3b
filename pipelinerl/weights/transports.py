"""An engine's end of every road: the slot's name says by which one it is reached."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch

from pipelinerl.errors import WeightsError
from pipelinerl.weights import calls, cuda_ipc, files, gloo, nccl, shared_memory
from pipelinerl.weights.manifest import Manifest
from pipelinerl.weights.transport import Arrival, Receiver


class Receivers:
    """Fetches by whichever road a slot lies on: a `Receiver`."""

    def __init__(self, *, folder: Path) -> None:
        """`folder` is where this machine sees the files that the trainer publishes."""
        self._roads: tuple[tuple[Callable[[str], object], Receiver], ...] = (
            (shared_memory.NAME.fullmatch, shared_memory.SharedMemoryReceiver()),
            (files.NAME.fullmatch, files.FilesReceiver(folder)),
            (cuda_ipc.NAME.fullmatch, cuda_ipc.CudaIpcReceiver()),
            (lambda name: name.startswith("gloo:") and calls.NAME.fullmatch(name), gloo.guest()),
            (lambda name: name.startswith("nccl:") and calls.NAME.fullmatch(name), nccl.guest()),
        )

    def fetch(self, slot: str, digest: str, spare: Callable[[Manifest], torch.Tensor]) -> Arrival:
        for leads_to, receiver in self._roads:
            if leads_to(slot):
                return receiver.fetch(slot, digest, spare)
        raise WeightsError(f"{slot!r} is not the name of a slot on any road: shared memory, files, gloo, nccl or CUDA IPC")

    def close(self) -> None:
        for _, receiver in self._roads:
            receiver.close()


def device_roads() -> tuple[str, ...]:
    """Roads between devices that this process could take."""
    if not torch.cuda.is_available():
        return ()
    has_nccl = importlib.util.find_spec("cupy") is not None
    return ("cuda_ipc", "nccl") if has_nccl else ("cuda_ipc",)
