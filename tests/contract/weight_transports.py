"""Both ends of every transport of the weights, small, for tests: a trainer that publishes random bits and an engine that takes them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from pipelinerl.messages import StageWeights, Tensor
from pipelinerl.weights import cuda_ipc, gloo, nccl
from pipelinerl.weights.base import num_bytes, plan_layout, views
from pipelinerl.weights.buffer_pool import WeightBufferPool
from pipelinerl.weights.cuda_ipc import CudaIpcSender
from pipelinerl.weights.files import FilesReceiver, FilesSender
from pipelinerl.weights.manifest import Manifest, seal
from pipelinerl.weights.point_to_point import PointToPointReceiver, PointToPointSender
from pipelinerl.weights.receiver import WeightReceiver
from pipelinerl.weights.reshard import Box, whole
from pipelinerl.weights.sharded.digests import manifest_of
from pipelinerl.weights.sharded.receiver import ShardReceiver
from pipelinerl.weights.sharded.target import name_of
from pipelinerl.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender
from pipelinerl.weights.shared_names import FOLDER, run_token
from pipelinerl.weights.swap import CopySwap, Placed, PointerSwap, SparseSwap
from pipelinerl.weights.transport import Receiver, WeightBuffer
from pipelinerl.weights.transports import connector
from tests.contract.device_stand_ins import StandInMemory, StandInNccl
from tests.weights.shards import TrainerRanks

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
class Transport:
    """A trainer's end, and a way to make engines' ends."""

    pool: WeightBufferPool
    receive: Callable[[], Receiver]
    damage: Callable[[str], None]
    """Cut the bytes of a published buffer in half, where they are."""
    layout: tuple[Tensor, ...] = LAYOUT
    made: Callable[[int], dict[str, torch.Tensor]] = tensors
    """The weights of a version."""
    hasty: Callable[[], Receiver] | None = None
    """Makes one that soon gives up waiting, where a transport waits at all."""

    def publish(self, version: int, *, tamper: Callable[[torch.Tensor, Manifest], Manifest] | None = None) -> StageWeights:
        """Publish random weights; `tamper` may spoil the bytes after their digests were taken, or the manifest."""
        buffer = self.pool.acquire(1.0)
        assert buffer is not None
        made = self.made(version)
        for name, view in views(buffer.memory, self.layout).items():
            view.copy_(made[name].reshape(view.shape) if name in made else torch.zeros(()))
        manifest = seal(version, buffer.memory, self.layout)
        if tamper is not None:
            manifest = tamper(buffer.memory, manifest)
        digest = self.pool.publish(buffer, manifest)
        return StageWeights(version=version, buffer=buffer.name, digest=digest)


def shared_memory(folder: Path, layout: tuple[Tensor, ...]) -> Transport:
    pool = WeightBufferPool(SharedMemorySender(run_token(folder)), num_bytes=num_bytes(layout), max_buffers=9)

    def damage(buffer: str) -> None:
        with open(FOLDER / buffer, "r+b") as file:
            file.truncate(num_bytes(layout) // 2)

    return Transport(pool=pool, receive=SharedMemoryReceiver, damage=damage, layout=layout)


def by_files(folder: Path, layout: tuple[Tensor, ...]) -> Transport:
    pool = WeightBufferPool(FilesSender(folder / "weights"), num_bytes=num_bytes(layout), max_buffers=9)

    def damage(buffer: str) -> None:
        with open(folder / "weights" / buffer, "r+b") as file:
            file.truncate(os.fstat(file.fileno()).st_size - num_bytes(layout) // 2)

    return Transport(pool=pool, receive=lambda: FilesReceiver(folder / "weights"), damage=damage, layout=layout)


def by_call(host: PointToPointSender, receiver: Callable[[float], PointToPointReceiver], layout: tuple[Tensor, ...]) -> Transport:
    def damage(buffer: str) -> None:
        number = int(buffer.rpartition("/")[2])
        encoded, payload = host._offered[number]
        host._offered[number] = encoded, payload[: len(payload) // 2]

    pool = WeightBufferPool(host, num_bytes=num_bytes(layout), max_buffers=9)
    return Transport(pool=pool, receive=lambda: receiver(20.0), damage=damage, layout=layout, hasty=lambda: receiver(1.0))


def by_gloo(folder: Path, layout: tuple[Tensor, ...]) -> Transport:
    return by_call(gloo.sender(deadline_s=20.0), lambda deadline_s: gloo.receiver(deadline_s=deadline_s), layout)


def by_nccl(folder: Path, layout: tuple[Tensor, ...]) -> Transport:
    host = nccl.sender(StandInNccl(), deadline_s=3.0)
    return by_call(host, lambda deadline_s: nccl.receiver(StandInNccl(), deadline_s=deadline_s), layout)


def by_cuda_ipc(folder: Path, layout: tuple[Tensor, ...]) -> Transport:
    memory = StandInMemory(folder)
    pool = WeightBufferPool(CudaIpcSender(run_token(folder), memory=memory), num_bytes=num_bytes(layout), max_buffers=9)

    def damage(buffer: str) -> None:
        with open(memory.path_of((FOLDER / f"{buffer}.handle").read_bytes()), "r+b") as file:
            file.truncate(num_bytes(layout) // 2)

    return Transport(pool=pool, receive=lambda: cuda_ipc.receiver(memory=memory), damage=damage, layout=layout)


class ByShards(Transport):
    """Two ranks hold halves of what is published, and none of them a whole policy."""

    ranks: TrainerRanks

    def make(self, number: int, num_bytes: int) -> WeightBuffer:
        return WeightBuffer(name=f"shards/{number}", memory=torch.zeros(num_bytes, dtype=torch.uint8))

    def offer(self, buffer: WeightBuffer, manifest: Manifest, encoded: bytes) -> None:
        number = int(buffer.name.rpartition("/")[2])
        self.ranks.ranks[0].offer(number, encoded)
        buffer.name = name_of(self.ranks.ranks[0].place, number, carrier="gloo")

    def close(self) -> None:
        self.ranks.close()

    def publish(self, version: int, *, tamper: Callable[[torch.Tensor, Manifest], Manifest] | None = None) -> StageWeights:
        buffer = self.pool.acquire(1.0)
        assert buffer is not None
        number = int(buffer.name.rpartition("/")[2])
        written = views(buffer.memory, self.layout)
        made = self.made(version)
        for name, view in written.items():
            view.copy_(made[name].reshape(view.shape) if name in made else torch.zeros(()))
        manifest = manifest_of(version, self.ranks.fill(number, version, written), self.layout)
        if tamper is not None:
            manifest = tamper(buffer.memory, manifest)
            self.ranks.fill(number, version, written)
        digest = self.pool.publish(buffer, manifest)
        return StageWeights(version=version, buffer=buffer.name, digest=digest)


def by_shards(folder: Path, layout: tuple[Tensor, ...]) -> Transport:
    halves: list[dict[str, Box]] = [{}, {}]
    for tensor in layout:
        rows = tensor.shape[0] // 2 if tensor.shape else 0
        for half, (first, end) in zip(halves, ((0, rows), (rows, tensor.shape[0] if tensor.shape else 0)), strict=True):
            if end > first:
                half[tensor.name] = ((first, end), *((0, size) for size in tensor.shape[1:]))
        if not tensor.shape:
            halves[1][tensor.name] = ()
    whole_one = [{tensor.name: [whole(tuple(tensor.shape))] for tensor in layout}]
    ranks = TrainerRanks(layout, sources=halves, targets=whole_one)

    def damage(buffer: str) -> None:
        ranks.ranks[1]._held[int(buffer.rpartition("/")[2])].headers = ()

    def receive() -> Receiver:
        return ShardReceiver(connector, layout=LAYOUT)

    transport = ByShards(pool=cast(Any, None), receive=receive, damage=damage, layout=layout)
    transport.ranks = ranks
    transport.pool = WeightBufferPool(transport, num_bytes=num_bytes(layout), max_buffers=9)
    return transport


TRANSPORTS: dict[str, Callable[[Path, tuple[Tensor, ...]], Transport]] = {
    "shared_memory": shared_memory,
    "files": by_files,
    "gloo": by_gloo,
    "nccl": by_nccl,
    "cuda_ipc": by_cuda_ipc,
    "sharded": by_shards,
}
BETWEEN_DEVICES = ("nccl", "cuda_ipc")
FOR_WHOLE_POLICIES = ("sharded",)
"""What changed is found by each rank, not in a whole policy: see `tests/weights/test_sharded_changes.py`."""


class Engine:
    """Parameters that take policies from a transport."""

    def __init__(self, receiver: Receiver, *, swap: type[PointerSwap] | type[CopySwap] | type[SparseSwap] = PointerSwap) -> None:
        first = tensors(0)
        self.parameters = {name: torch.nn.Parameter(first[name].clone(), requires_grad=False) for name in first}
        placed = [
            Placed(parameter=self.parameters[tensor.name], offset_bytes=tensor.offset_bytes, num_bytes=tensor.num_bytes)
            for tensor in LAYOUT
        ]
        self._receiver = receiver
        self.weight_receiver = WeightReceiver(swap(placed), layout=LAYOUT, receiver=self._receiver)

    def take(self, order: StageWeights) -> None:
        self.weight_receiver.stage(order)
        self.weight_receiver.commit()

    def holds(self, version: int) -> bool:
        expected = tensors(version)
        return all(same_bits(parameter.data, expected[name]) for name, parameter in self.parameters.items())

    def close(self) -> None:
        self._receiver.close()


RECEIVERS: dict[str, Callable[[Path, float], Receiver]] = {
    "shared_memory": lambda folder, deadline_s: SharedMemoryReceiver(),
    "files": lambda folder, deadline_s: FilesReceiver(folder / "weights"),
    "gloo": lambda folder, deadline_s: gloo.receiver(deadline_s=deadline_s),
    "nccl": lambda folder, deadline_s: nccl.receiver(StandInNccl(), deadline_s=deadline_s),
    "cuda_ipc": lambda folder, deadline_s: cuda_ipc.receiver(memory=StandInMemory(folder)),
}
"""The same ends of engines for a trainer in another process, by the folder it was given and their deadline."""
