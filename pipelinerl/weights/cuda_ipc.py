"""The transport between GPUs of one machine: the trainer writes a buffer in its device's memory, and engines open the same memory.

A handle of the memory travels, in a file beside the weight buffer's manifest, readable by its owner only. Nothing is copied through
the host but for the digests. What touches a device is behind `Memory`: tests run the same protocol over memory of the host.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from pipelinerl.errors import NoRoom, WeightsError
from pipelinerl.runtime.machine import say_bytes
from pipelinerl.weights import device_memory
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
        """Reserve [bytes] uint8, and a handle of it. Raises `NoRoom` where there is none."""
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


class Handle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What CUDA needs to open another process's memory, as torch hands it out and takes it back."""

    gpu: str
    """UUID of the GPU; its index is another one in each process."""
    memory: bytes
    num_bytes: int
    offset_bytes: int
    counter: bytes
    """Counter of references, in memory that both map."""
    counter_offset: int
    event: bytes
    waits_for_event: bool

    @classmethod
    def of(cls, shared: tuple[int, bytes, int, int, bytes, int, bytes, bool], uuids: Sequence[str]) -> Handle:
        """The handle of what torch shared (`UntypedStorage._share_cuda_`), by a process that sees the GPUs of these UUIDs."""
        index, memory, num_bytes, offset_bytes, counter, counter_offset, event, waits_for_event = shared
        return cls(
            gpu=uuids[index],
            memory=memory,
            num_bytes=num_bytes,
            offset_bytes=offset_bytes,
            counter=counter,
            counter_offset=counter_offset,
            event=event,
            waits_for_event=waits_for_event,
        )

    def shared(self, uuids: Sequence[str]) -> tuple[int, bytes, int, int, bytes, int, bytes, bool]:
        """As torch takes it (`_new_shared_cuda`), in a process that sees the GPUs of these UUIDs. Raises `WeightsError` for another GPU."""
        if self.gpu not in uuids:
            raise WeightsError(
                f"the trainer's policy lies on GPU {self.gpu}, which this process does not see: it sees {', '.join(uuids) or 'none'}. Leave"
                " the trainer's GPUs in CUDA_VISIBLE_DEVICES, behind the engine's own, or set weights.transport to shared_memory"
            )
        numbers = self.num_bytes, self.offset_bytes, self.counter, self.counter_offset, self.event, self.waits_for_event
        return uuids.index(self.gpu), self.memory, *numbers


def room_for_policies(*, free_bytes: int, allocated_bytes: int, training_bytes: int) -> int:
    """Bytes of the trainer's device that policies may take: what is free, less what training will still allocate."""
    return free_bytes - max(0, training_bytes - allocated_bytes)


class CudaMemory:
    """The present CUDA device's memory: a `Memory`."""

    def __init__(self, *, training_bytes: int = 0) -> None:
        """`training_bytes`: all that training on this device will hold at once, which no policy may take."""
        if not torch.cuda.is_available():
            raise WeightsError("the transport cuda_ipc needs a CUDA device in this process, and there is none")
        self._training_bytes = training_bytes
        self._own_bytes = 0
        """In policies."""

    def make(self, num_bytes: int) -> tuple[torch.Tensor, bytes]:
        free_bytes = device_memory.free_bytes()
        allocated_bytes = torch.cuda.memory_allocated() - self._own_bytes
        room = room_for_policies(free_bytes=free_bytes, allocated_bytes=allocated_bytes, training_bytes=self._training_bytes)
        if num_bytes > room:
            raise NoRoom(
                f"no room for a policy of {say_bytes(num_bytes)} on the trainer's device: {say_bytes(free_bytes)} are free, and training,"
                f" which holds {say_bytes(allocated_bytes)}, will hold {say_bytes(self._training_bytes)}"
            )
        try:
            buffer = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            raise NoRoom(f"no room for a policy of {say_bytes(num_bytes)} on the trainer's device: {error}") from None
        self._own_bytes += num_bytes
        storage: Any = buffer.untyped_storage()
        return buffer, msgspec.msgpack.encode(Handle.of(storage._share_cuda_(), _visible_uuids()))

    def open(self, handle: bytes) -> torch.Tensor:
        try:
            found = msgspec.msgpack.decode(handle, type=Handle)
            storage: Any = torch.UntypedStorage
            opened = storage._new_shared_cuda(*found.shared(_visible_uuids()))
        except (RuntimeError, msgspec.DecodeError) as error:
            raise WeightsError(f"cannot open the trainer's device memory: {error}; is it alive, and on this machine?") from error
        return torch.empty(0, dtype=torch.uint8, device=opened.device).set_(opened)


def _visible_uuids() -> list[str]:
    """UUIDs of the GPUs that this process sees, by index."""
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(torch.cuda.device_count())]
