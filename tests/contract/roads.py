"""Both ends of every road of the weights, small, for tests: a trainer that publishes random bits and an engine that takes them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import torch

from pipelinerl.messages import StageWeights, Tensor
from pipelinerl.weights import gloo, nccl
from pipelinerl.weights.base import num_bytes, plan_layout, views
from pipelinerl.weights.buffer_pool import SlotPool
from pipelinerl.weights.calls import Guest, Host
from pipelinerl.weights.commit import Copy, Flip, Placed, Scatter
from pipelinerl.weights.cuda_ipc import CudaIpc, CudaIpcReceiver
from pipelinerl.weights.files import Files, FilesReceiver
from pipelinerl.weights.manifest import Manifest, seal
from pipelinerl.weights.receiver import Intake
from pipelinerl.weights.shared_memory import SharedMemory, SharedMemoryReceiver
from pipelinerl.weights.shared_names import FOLDER, run_token
from pipelinerl.weights.transport import Receiver
from tests.contract.device_stand_ins import StandInMemory, StandInNccl

SHAPES = {
    "embed": ((50, 16), torch.bfloat16),
    "norm": ((16,), torch.float32),
    "scale": ((), torch.float16),
    "none": ((0, 4), torch.float32),
    "head": ((16, 50), torch.bfloat16),
}


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Random bytes as weights, NaNs and denormals among them; the same for a version at every call."""
    generator = torch.Generator().manual_seed(version)
    made = {}
    for name, (shape, dtype) in SHAPES.items():
        count = torch.Size(shape).numel() * dtype.itemsize
        made[name] = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)
    return made


LAYOUT = plan_layout(tensors(0))


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bit for bit, NaNs too."""
    one, other = (tensor.detach().reshape(-1).view(torch.uint8) for tensor in (found, expected))
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(one, other)


@dataclasses.dataclass(kw_only=True)
class Road:
    """A trainer's end, and a way to make engines' ends."""

    pool: SlotPool
    receive: Callable[[], Receiver]
    damage: Callable[[str], None]
    """Cut the bytes of a published slot in half, where they are."""
    layout: tuple[Tensor, ...] = LAYOUT
    made: Callable[[int], dict[str, torch.Tensor]] = tensors
    """The weights of a version."""
    hasty: Callable[[], Receiver] | None = None
    """Makes one that soon gives up waiting, where a road waits at all."""

    def publish(self, version: int, *, tamper: Callable[[torch.Tensor, Manifest], Manifest] | None = None) -> StageWeights:
        """Publish random weights; `tamper` may spoil the bytes after their digests were taken, or the manifest."""
        slot = self.pool.acquire(1.0)
        assert slot is not None
        made = self.made(version)
        for name, view in views(slot.buffer, self.layout).items():
            view.copy_(made[name].reshape(view.shape) if name in made else torch.zeros(()))
        manifest = seal(version, slot.buffer, self.layout)
        if tamper is not None:
            manifest = tamper(slot.buffer, manifest)
        digest = self.pool.publish(slot, manifest)
        return StageWeights(version=version, slot=slot.name, digest=digest)


def shared_memory(folder: Path, layout: tuple[Tensor, ...]) -> Road:
    pool = SlotPool(SharedMemory(run_token(folder)), num_bytes=num_bytes(layout), max_slots=9)

    def damage(slot: str) -> None:
        with open(FOLDER / slot, "r+b") as file:
            file.truncate(num_bytes(layout) // 2)

    return Road(pool=pool, receive=SharedMemoryReceiver, damage=damage, layout=layout)


def by_files(folder: Path, layout: tuple[Tensor, ...]) -> Road:
    pool = SlotPool(Files(folder / "weights"), num_bytes=num_bytes(layout), max_slots=9)

    def damage(slot: str) -> None:
        with open(folder / "weights" / slot, "r+b") as file:
            file.truncate(os.fstat(file.fileno()).st_size - num_bytes(layout) // 2)

    return Road(pool=pool, receive=lambda: FilesReceiver(folder / "weights"), damage=damage, layout=layout)


def by_call(host: Host, guest: Callable[[float], Guest], layout: tuple[Tensor, ...]) -> Road:
    def damage(slot: str) -> None:
        number = int(slot.rpartition("/")[2])
        encoded, payload = host._offered[number]
        host._offered[number] = encoded, payload[: len(payload) // 2]

    pool = SlotPool(host, num_bytes=num_bytes(layout), max_slots=9)
    return Road(pool=pool, receive=lambda: guest(20.0), damage=damage, layout=layout, hasty=lambda: guest(1.0))


def by_gloo(folder: Path, layout: tuple[Tensor, ...]) -> Road:
    return by_call(gloo.host(deadline_s=20.0), lambda deadline_s: gloo.guest(deadline_s=deadline_s), layout)


def by_nccl(folder: Path, layout: tuple[Tensor, ...]) -> Road:
    host = nccl.host(StandInNccl(), deadline_s=3.0)
    return by_call(host, lambda deadline_s: nccl.guest(StandInNccl(), deadline_s=deadline_s), layout)


def by_cuda_ipc(folder: Path, layout: tuple[Tensor, ...]) -> Road:
    memory = StandInMemory(folder)
    pool = SlotPool(CudaIpc(run_token(folder), memory=memory), num_bytes=num_bytes(layout), max_slots=9)

    def damage(slot: str) -> None:
        with open(memory.path_of((FOLDER / f"{slot}.handle").read_bytes()), "r+b") as file:
            file.truncate(num_bytes(layout) // 2)

    return Road(pool=pool, receive=lambda: CudaIpcReceiver(memory=memory), damage=damage, layout=layout)


ROADS: dict[str, Callable[[Path, tuple[Tensor, ...]], Road]] = {
    "shared_memory": shared_memory,
    "files": by_files,
    "gloo": by_gloo,
    "nccl": by_nccl,
    "cuda_ipc": by_cuda_ipc,
}
BETWEEN_DEVICES = ("nccl", "cuda_ipc")


class Engine:
    """Parameters that take policies from a road."""

    def __init__(self, receiver: Receiver, *, commit: type[Flip] | type[Copy] | type[Scatter] = Flip) -> None:
        first = tensors(0)
        self.parameters = {name: torch.nn.Parameter(first[name].clone(), requires_grad=False) for name in first}
        placed = [
            Placed(parameter=self.parameters[tensor.name], offset_bytes=tensor.offset_bytes, num_bytes=tensor.num_bytes)
            for tensor in LAYOUT
        ]
        self._receiver = receiver
        self.intake = Intake(commit(placed), layout=LAYOUT, receiver=self._receiver)

    def take(self, order: StageWeights) -> None:
        self.intake.stage(order)
        self.intake.commit()

    def holds(self, version: int) -> bool:
        expected = tensors(version)
        return all(same_bits(parameter.data, expected[name]) for name, parameter in self.parameters.items())

    def close(self) -> None:
        self._receiver.close()


RECEIVERS: dict[str, Callable[[Path, float], Receiver]] = {
    "shared_memory": lambda folder, deadline_s: SharedMemoryReceiver(),
    "files": lambda folder, deadline_s: FilesReceiver(folder / "weights"),
    "gloo": lambda folder, deadline_s: gloo.guest(deadline_s=deadline_s),
    "nccl": lambda folder, deadline_s: nccl.guest(StandInNccl(), deadline_s=deadline_s),
    "cuda_ipc": lambda folder, deadline_s: CudaIpcReceiver(memory=StandInMemory(folder)),
}
"""The same ends of engines for a trainer in another process, by the folder it was given and their deadline."""
