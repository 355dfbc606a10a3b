"""Policies in device memory: whose GPU a handle means, what training needs of the room, and where a policy goes that finds none."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pipelinerl.errors import NoRoom, WeightsError
from pipelinerl.weights import cuda_ipc
from pipelinerl.weights.base import num_bytes, plan_layout
from pipelinerl.weights.buffer_pool import WeightBufferPool
from pipelinerl.weights.cuda_ipc import CudaIpcSender, CudaMemory, Handle, room_for_policies
from pipelinerl.weights.manifest import seal
from pipelinerl.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender
from pipelinerl.weights.transports import RoomierSender
from tests.contract.device_stand_ins import StandInMemory

LAYOUT = plan_layout({"a": torch.zeros(100)})
GIB = 1 << 30


def test_a_handle_means_the_same_gpu_in_a_process_that_counts_them_in_another_order():
    shared = (1, b"memory", 64, 128, b"counter", 3, b"event", True)
    handle = Handle.of(shared, ["GPU-a", "GPU-b"])
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=Handle)
    assert sent.shared(["GPU-c", "GPU-a", "GPU-b"]) == (2, *shared[1:])
    assert sent.shared(["GPU-b"]) == (0, *shared[1:])
    with pytest.raises(WeightsError, match=r"lies on GPU GPU-b, which this process does not see: it sees GPU-a\. Leave"):
        sent.shared(["GPU-a"])


def test_policies_leave_training_what_it_has_not_allocated_yet():
    assert room_for_policies(free_bytes=50, allocated_bytes=20, training_bytes=60) == 10
    assert room_for_policies(free_bytes=50, allocated_bytes=70, training_bytes=60) == 50


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A device of so many free bytes, of which training holds some."""
    numbers = {"free": 40 * GIB, "allocated": 16 * GIB, "reserved": 18 * GIB}
    cuda: Any = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "mem_get_info", lambda device=None: (numbers["free"], 80 * GIB))
    monkeypatch.setattr(cuda, "memory_allocated", lambda device=None: numbers["allocated"])
    monkeypatch.setattr(cuda, "memory_reserved", lambda device=None: numbers["reserved"])
    return numbers


def test_a_policy_that_training_would_run_out_of_memory_for_finds_no_room(device: dict[str, int]):
    memory = CudaMemory(training_bytes=50 * GIB)
    with pytest.raises(
        NoRoom, match=r"policy of 16\.0 GiB .* 42\.0 GiB are free, and training, which holds 16\.0 GiB, will hold 50\.0 GiB"
    ):
        memory.make(16 * GIB)


def test_a_device_that_is_full_after_all_is_no_room_and_not_the_end(device: dict[str, int], monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("3 GiB are free")

    memory = CudaMemory()
    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(NoRoom, match="3 GiB are free"):
        memory.make(16 * GIB)


class _Small(StandInMemory):
    """Memory with room for two policies."""

    left = 2

    def make(self, num_bytes: int) -> tuple[torch.Tensor, bytes]:
        if not self.left:
            raise NoRoom("no room on the device")
        self.left -= 1
        return super().make(num_bytes)


def test_the_policy_that_finds_no_room_on_the_device_travels_through_shared_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    memory, token = _Small(tmp_path), secrets.token_hex(8)
    sender = RoomierSender(CudaIpcSender(token, memory=memory), SharedMemorySender(token), instead="shared memory")
    pool = WeightBufferPool(sender, num_bytes=num_bytes(LAYOUT), max_buffers=3)
    with contextlib.closing(pool):
        names = []
        for version in (1, 2, 3):
            buffer = pool.acquire(1.0)
            assert buffer is not None
            buffer.memory[0] = version
            digest = pool.publish(buffer, seal(version, buffer.memory, LAYOUT))
            names.append(buffer.name)
            receiver = cuda_ipc.receiver(memory=memory) if "-ipc" in buffer.name else SharedMemoryReceiver()
            assert int(receiver.fetch(buffer.name, digest, lambda manifest: torch.zeros(0)).data[0]) == version
        assert ["-ipc" in name for name in names] == [True, True, False]
        assert "policies in weight buffer 2 travel through shared memory: no room on the device" in caplog.text
    assert not list(Path("/dev/shm").glob(f"pipelinerl-{token}-*"))
