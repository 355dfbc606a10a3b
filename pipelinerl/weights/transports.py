"""All transports of weights: the trainer's end is chosen by the transport's name, an engine's end by the weight buffer's."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from pipelinerl.errors import NoRoom, WeightsError
from pipelinerl.transport.endpoint import own_address
from pipelinerl.weights import cuda_ipc, files, gloo, nccl, point_to_point, shared_memory
from pipelinerl.weights.manifest import Manifest
from pipelinerl.weights.point_to_point import Connect
from pipelinerl.weights.sharded import target
from pipelinerl.weights.shared_names import run_token
from pipelinerl.weights.transport import Payload, Receiver, Sender, WeightBuffer

log = logging.getLogger(__name__)


def open_sender(transport: str, *, run_folder: Path, address: str | None = None, training_bytes: int = 0) -> Sender:
    """Open the trainer's end of a transport. Raises `WeightsError` where that cannot be.

    `training_bytes`: what training holds at once on this rank's device; policies leave it. `address` is this machine's, where policies
    travel over the network; default: the one on its way to the orchestrator.
    """
    match transport:
        case "shared_memory":
            return shared_memory.SharedMemorySender(run_token(run_folder))
        case "files":
            return files.FilesSender(run_folder / "weights")
        case "cuda_ipc":
            token = run_token(run_folder)
            on_device = cuda_ipc.CudaIpcSender(token, memory=cuda_ipc.CudaMemory(training_bytes=training_bytes))
            return RoomierSender(on_device, shared_memory.SharedMemorySender(token), instead="shared memory")
        case "gloo":
            return gloo.sender(address or own_address(run_folder, "trainer"))
        case "nccl":
            return nccl.sender(address=address or own_address(run_folder, "trainer"))
        case _:
            raise WeightsError(f"the orchestrator asks for the transport {transport!r}, which this trainer does not know")


class RoomierSender:
    """Makes weight buffers by one transport, and by another, with more room, what finds none: a `Sender`.

    Engines tell them apart by their names, so each policy goes the shortest way that has room for it.
    """

    def __init__(self, first: Sender, second: Sender, *, instead: str) -> None:
        """`instead` is what the second is called, for the one line that says so."""
        self._first, self._second = first, second
        self._instead = instead
        self._made: dict[int, Sender] = {}
        """Who made a buffer, by its identity: its name may change."""

    def make(self, number: int, num_bytes: int) -> WeightBuffer:
        sender = self._first
        try:
            buffer = sender.make(number, num_bytes)
        except NoRoom as error:
            log.warning("policies in weight buffer %d travel through %s: %s", number, self._instead, error)
            sender = self._second
            buffer = sender.make(number, num_bytes)
        self._made[id(buffer)] = sender
        return buffer

    def offer(self, buffer: WeightBuffer, manifest: Manifest, encoded: bytes) -> None:
        self._made[id(buffer)].offer(buffer, manifest, encoded)

    def close(self) -> None:
        self._first.close()
        self._second.close()


class AutoReceiver:
    """Fetches by whichever transport a buffer lies on: a `Receiver`."""

    def __init__(self, *, folder: Path, sharded: Receiver | None = None) -> None:
        """`folder` is where this machine sees the files that the trainer publishes; `sharded` takes shards, where this engine can."""
        self._receivers: tuple[tuple[Callable[[str], object], Receiver], ...] = (
            (shared_memory.NAME.fullmatch, shared_memory.SharedMemoryReceiver()),
            (files.NAME.fullmatch, files.FilesReceiver(folder)),
            (cuda_ipc.NAME.fullmatch, cuda_ipc.receiver()),
            (lambda name: name.startswith("gloo:") and point_to_point.NAME.fullmatch(name), gloo.receiver()),
            (lambda name: name.startswith("nccl:") and point_to_point.NAME.fullmatch(name), nccl.receiver()),
            *(((target.NAME.fullmatch, sharded),) if sharded is not None else ()),
        )

    def fetch(self, name: str, digest: str, spare: Callable[[Manifest], torch.Tensor]) -> Payload:
        for reaches, receiver in self._receivers:
            if reaches(name):
                return receiver.fetch(name, digest, spare)
        raise WeightsError(f"{name!r} is not the name of a weight buffer on any transport that this engine knows")

    def close(self) -> None:
        for _, receiver in self._receivers:
            receiver.close()


def device_transports() -> tuple[str, ...]:
    """Transports between devices that this process could take."""
    if not torch.cuda.is_available():
        return ()
    has_nccl = importlib.util.find_spec("cupy") is not None
    return ("cuda_ipc", "nccl", "sharded+nccl") if has_nccl else ("cuda_ipc",)


def connector(carrier: str) -> Connect:
    """Connects one end to one other, by gloo or by NCCL. Raises `WeightsError` where NCCL is missing."""
    return nccl.connector() if carrier == "nccl" else gloo.connect
