"""The transports between devices on real ones; and what they say where there is none."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.weights import nccl
from pipelinerl.weights.base import num_bytes, plan_layout, views
from pipelinerl.weights.buffer_pool import WeightBufferPool
from pipelinerl.weights.cuda_ipc import CudaIpcSender, CudaMemory
from pipelinerl.weights.manifest import seal
from pipelinerl.weights.swap import Placed, SwapMode, make_swap
from pipelinerl.weights.transport import Sender

LAYOUT = plan_layout({"a": torch.zeros(1000), "b": torch.zeros(7, 5, dtype=torch.bfloat16)})
ENGINE = """
import sys, torch
from pipelinerl.weights.manifest import verify
from pipelinerl.weights.transports import AutoReceiver
from pathlib import Path
torch.cuda.set_device(int(sys.argv[3]))
spare = lambda manifest: torch.zeros(manifest.num_bytes, dtype=torch.uint8)
payload = AutoReceiver(folder=Path(".")).fetch(sys.argv[1], sys.argv[2], spare)
verify(payload.manifest, payload.data, name="s")
print(payload.data.device.type)
"""


def fetched_by_another_process(sender: Sender, *, device: int) -> str:
    """Publish over a transport and have another process fetch and verify; where it has the bytes."""
    pool = WeightBufferPool(sender, num_bytes=num_bytes(LAYOUT))
    try:
        buffer = pool.acquire(1.0)
        assert buffer is not None
        for number, view in enumerate(views(buffer.memory, LAYOUT).values()):
            view.fill_(number + 1)
        digest = pool.publish(buffer, seal(1, buffer.memory, LAYOUT))
        command = [sys.executable, "-c", ENGINE, buffer.name, digest, str(device)]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout.strip()
    finally:
        pool.close()


@pytest.mark.gpu
def test_another_process_opens_a_policy_in_device_memory():
    assert fetched_by_another_process(CudaIpcSender(uuid.uuid4().hex), device=0) == "cuda"


@pytest.mark.gpu
def test_a_policy_travels_by_nccl_to_another_device():
    pytest.importorskip("cupy", reason="the transport nccl goes through CuPy")
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a device for each end, and there is one")
    assert fetched_by_another_process(nccl.sender(deadline_s=60.0), device=1) == "cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("gathers", [True, False])
def test_a_copy_between_device_buffers_leaves_addresses_and_brings_every_bit(gathers: bool):
    parameters = [
        Placed(
            parameter=torch.nn.Parameter(torch.zeros(tensor.shape, device="cuda", dtype=getattr(torch, tensor.dtype)), requires_grad=False),
            offset_bytes=tensor.offset_bytes,
            num_bytes=tensor.num_bytes,
        )
        for tensor in LAYOUT
    ]
    by = make_swap(SwapMode.COPY, parameters, gathers=gathers)
    before = [one.parameter.data_ptr() for one in parameters]
    policy = torch.randint(0, 256, (num_bytes(LAYOUT),), dtype=torch.uint8)
    by.stage(policy)
    assert all(not one.parameter.any() for one in parameters)
    by.commit()
    torch.cuda.synchronize()
    for one in parameters:
        expected = policy[one.offset_bytes : one.offset_bytes + one.num_bytes]
        assert torch.equal(one.parameter.view(-1).view(torch.uint8).cpu(), expected)
    assert [one.parameter.data_ptr() for one in parameters] == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where it is missing")
def test_without_a_device_the_roads_between_devices_say_what_they_need(tmp_path: Path):
    with pytest.raises(WeightsError, match="the transport nccl needs"):
        nccl.sender()
    with pytest.raises(WeightsError, match="cuda_ipc needs a CUDA device in this process"):
        CudaMemory()
