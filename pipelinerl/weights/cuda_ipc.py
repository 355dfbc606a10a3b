"""The transport between GPUs of one machine: the trainer writes a buffer in its device's memory, and engines open the same memory.

A handle of the memory travels, in a file beside the weight buffer's manifest, readable by its owner only. Nothing is copied through
the host but for the digests. What touches a device is behind `Memory`: tests run the same protocol over memory of the host.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.weights.manifest import Manifest
from pipelinerl.weights.shared_memory import MANIFEST_SUFFIX, SharedMemoryReceiver, read_beside, write_beside
from pipelinerl.weights.shared_names import FOLDER, Owner
from pipelinerl.weights.timeline import timeline_of
from pipelinerl.weights.transport import WeightBuffer

NAME = re.compile(r"pipelinerl-[0-9a-zA-Z]+-ipc[0-9]+")
HANDLE_SUFFIX = ".handle"


class Memory(Protocol):
    """Memory of a device that other processes of the machine can open."""

    def make(self, num_bytes: int) -> tuple[torch.Tensor, bytes]:
        """Reserve [bytes] uint8, and a handle of it. Raises `WeightsError` where there is no room."""
        ...

    def open(self, handle: bytes) -> torch.Tensor:
        """Open the memory of a handle. Raises `WeightsError` where the process that made it is gone."""
        ...


class CudaIpcSender:
    """Weight buffers in a device's memory: a `Sender`."""

    def __init__(self, token: str, *, memory: Memory | None = None, folder: Path = FOLDER) -> None:
        """Remove what a dead run of the same token left behind. Raises `WeightsError` where there is no CUDA device."""
        self._token, self._folder = token, folder
        self._memory = memory or CudaMemory()
        self._owner = Owner(token, folder=folder)

    def make(self, number: int, num_bytes: int) -> WeightBuffer:
        name = f"pipelinerl-{self._token}-ipc{os.getpid()}{number}"  # by process, too: engines keep weight buffers open by name
        buffer, handle = self._memory.make(num_bytes)
        write_beside(name, HANDLE_SUFFIX, handle, folder=self._folder)
        return WeightBuffer(name=name, memory=buffer)

    def offer(self, buffer: WeightBuffer, manifest: Manifest, encoded: bytes) -> None:
        timeline_of(
            buffer.memory.device
        ).finish()  # an engine's stream knows nothing of ours; what else runs on the device is not waited for
        write_beside(buffer.name, MANIFEST_SUFFIX, encoded, folder=self._folder)

    def close(self) -> None:
        self._owner.close()


def receiver(*, memory: Memory | None = None, folder: Path = FOLDER) -> SharedMemoryReceiver:
    """An engine's end; what is missing here is said at the first fetch."""

    def open_buffer(name: str) -> torch.Tensor:
        device = memory or CudaMemory()
        return device.open(read_beside(name, HANDLE_SUFFIX, folder=folder, pattern=NAME))

    return SharedMemoryReceiver(folder=folder, open_buffer=open_buffer, suffix=HANDLE_SUFFIX, pattern=NAME)


_Handle = tuple[int, bytes, int, int, bytes, int, bytes, bool]
"""What CUDA needs to open another process's memory, as torch hands it out and takes it back: device, memory, its size and offset in bytes,
counter of references and its offset, event, whether it must be waited for."""


class CudaMemory:
    """The present CUDA device's memory: a `Memory`."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise WeightsError("the transport cuda_ipc needs a CUDA device in this process, and there is none")

    def make(self, num_bytes: int) -> tuple[torch.Tensor, bytes]:
        try:
            buffer = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            raise WeightsError(f"no room for a policy of {num_bytes} bytes on the device: {error}") from None
        storage: Any = buffer.untyped_storage()
        return buffer, msgspec.msgpack.encode(storage._share_cuda_())

    def open(self, handle: bytes) -> torch.Tensor:
        try:
            found = msgspec.msgpack.decode(handle, type=_Handle)
            storage: Any = torch.UntypedStorage
            opened = storage._new_shared_cuda(*found)
        except (RuntimeError, msgspec.DecodeError) as error:
            raise WeightsError(f"cannot open the trainer's device memory: {error}; is it alive, and on this machine?") from error
        return torch.empty(0, dtype=torch.uint8, device=opened.device).set_(opened)
