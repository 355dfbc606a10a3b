"""An engine needs no setting to find a policy: the buffer's name says by which transport it lies."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.weights import gloo
from pipelinerl.weights.base import num_bytes, plan_layout
from pipelinerl.weights.buffer_pool import WeightBufferPool
from pipelinerl.weights.files import FilesSender
from pipelinerl.weights.manifest import seal
from pipelinerl.weights.shared_memory import SharedMemorySender
from pipelinerl.weights.transport import Sender
from pipelinerl.weights.transports import AutoReceiver

LAYOUT = plan_layout({"a": torch.zeros(100)})


@pytest.fixture(params=["shared_memory", "files", "gloo"])
def sender(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sender]:
    made: dict[str, Sender] = {}
    match request.param:
        case "shared_memory":
            made["it"] = SharedMemorySender(secrets.token_hex(8))
        case "files":
            made["it"] = FilesSender(tmp_path)
        case _:
            made["it"] = gloo.sender()
    yield made["it"]
    made["it"].close()


def test_the_name_of_a_buffer_leads_to_its_bytes(sender: Sender, tmp_path: Path):
    pool = WeightBufferPool(sender, num_bytes=num_bytes(LAYOUT))
    buffer = pool.acquire(0.0)
    assert buffer is not None
    buffer.memory.fill_(3)
    digest = pool.publish(buffer, seal(1, buffer.memory, LAYOUT))
    receivers = AutoReceiver(folder=tmp_path)
    payload = receivers.fetch(buffer.name, digest, lambda manifest: torch.zeros(num_bytes(LAYOUT), dtype=torch.uint8))
    assert payload.data.eq(3).all()
    receivers.close()


@pytest.mark.parametrize("buffer", ["", "nowhere", "https://example.org/policy", "policy-1.safetensors.draft", "pipelinerl-a-0.manifest"])
def test_a_name_that_leads_nowhere_is_refused(buffer: str, tmp_path: Path):
    with pytest.raises(WeightsError, match="is not the name of a weight buffer on any transport"):
        AutoReceiver(folder=tmp_path).fetch(buffer, "ab", lambda manifest: torch.zeros(0))
