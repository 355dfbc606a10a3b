"""An engine needs no setting to find a policy: the slot's name says by which road it lies."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.weights import gloo
from pipelinerl.weights.base import num_bytes, plan_layout
from pipelinerl.weights.buffer_pool import SlotPool
from pipelinerl.weights.files import Files
from pipelinerl.weights.manifest import seal
from pipelinerl.weights.shared_memory import SharedMemory
from pipelinerl.weights.transport import Medium
from pipelinerl.weights.transports import Receivers

LAYOUT = plan_layout({"a": torch.zeros(100)})


@pytest.fixture(params=["shared_memory", "files", "gloo"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Medium]:
    made: dict[str, Medium] = {}
    match request.param:
        case "shared_memory":
            made["it"] = SharedMemory(secrets.token_hex(8))
        case "files":
            made["it"] = Files(tmp_path)
        case _:
            made["it"] = gloo.host()
    yield made["it"]
    made["it"].close()


def test_the_name_of_a_slot_leads_to_its_bytes(medium: Medium, tmp_path: Path):
    pool = SlotPool(medium, num_bytes=num_bytes(LAYOUT))
    slot = pool.acquire(0.0)
    assert slot is not None
    slot.buffer.fill_(3)
    digest = pool.publish(slot, seal(1, slot.buffer, LAYOUT))
    receivers = Receivers(folder=tmp_path)
    arrival = receivers.fetch(slot.name, digest, lambda manifest: torch.zeros(num_bytes(LAYOUT), dtype=torch.uint8))
    assert arrival.payload.eq(3).all()
    receivers.close()


@pytest.mark.parametrize("slot", ["", "nowhere", "https://example.org/policy", "policy-1.safetensors.draft", "pipelinerl-a-0.manifest"])
def test_a_name_that_leads_nowhere_is_refused(slot: str, tmp_path: Path):
    with pytest.raises(WeightsError, match="is not the name of a slot on any road"):
        Receivers(folder=tmp_path).fetch(slot, "ab", lambda manifest: torch.zeros(0))
