"""Commit, digests, publishing and receiving on a device: where each tensor is, on which stream it is moved, and what the host waits for.

Run by `tests/test_on_a_device.py`, in a process where torch has the pretended device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.messages import StageWeights
from pipelinerl.weights.base import num_bytes, plan_layout
from pipelinerl.weights.delta import Delta
from pipelinerl.weights.manifest import DigestKind, Manifest, digest_of, encode, open_manifest, seal, verify, with_sums
from pipelinerl.weights.receiver import WeightReceiver
from pipelinerl.weights.swap import CopySwap, Placed, SparseSwap, Staging
from pipelinerl.weights.timeline import timeline_of
from pipelinerl.weights.transport import Payload, WeightBuffer
from tests.pretended.traffic import CUDA, Traffic, on_a_device
from trainer.weights import publisher as publishing
from trainer.weights.async_publisher import AsyncPublisher
from trainer.weights.publisher import Publisher

SHAPES = {"a": ((1000,), torch.float32), "b": ((7, 5), torch.bfloat16)}
SIZE = 4102


@pytest.fixture
def device() -> Iterator[Traffic]:
    with on_a_device() as traffic:
        yield traffic


LAYOUT = plan_layout({name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in SHAPES.items()})


CHANGES = Delta(positions={4: np.array([3, 500]), 2: np.array([7])}, values={4: np.array([1, 2], np.uint32), 2: np.array([5], np.uint16)})
"""Of two elements of the first tensor and one of the second."""


def placed() -> list[Placed]:
    return [
        Placed(
            parameter=torch.nn.Parameter(torch.empty(tensor.shape, device=CUDA, dtype=getattr(torch, tensor.dtype)), requires_grad=False),
            offset_bytes=tensor.offset_bytes,
            num_bytes=tensor.num_bytes,
        )
        for tensor in LAYOUT
    ]


def policy(where: torch.device | str) -> torch.Tensor:
    return torch.empty(num_bytes(LAYOUT), dtype=torch.uint8, device=where)


@pytest.mark.parametrize("kind", [CopySwap, SparseSwap])
def test_a_policy_of_the_host_is_brought_beside_the_forward_passes_and_committed_on_their_stream(kind: type[CopySwap], device: Traffic):
    swap = kind(placed())
    device.forget()
    swap.stage(policy("cpu"))
    assert device.brought == [f"copy_ uint8[{SIZE}]"]
    (beside,) = device.streams_of("copy_")
    assert beside != 0, "a copy on the stream of the forward passes would stand between two of them"
    device.forget()
    swap.commit()
    assert (device.fetched, device.brought) == ([], []), "a pause would last as long as the bus takes"
    assert device.streams_of("copy_") == [0] * len(LAYOUT)


def test_a_policy_that_waits_on_the_host_is_brought_in_the_commit(device: Traffic):
    swap = CopySwap(placed(), staging=Staging.HOST)
    device.forget()
    swap.stage(policy("cpu"))
    assert device.brought == []
    swap.commit()
    assert len(device.brought) == len(LAYOUT)


def test_a_policy_in_the_devices_own_memory_is_read_where_it_lies(device: Traffic):
    swap = CopySwap(placed())
    device.forget()
    swap.stage(policy(CUDA))
    swap.commit()
    assert (device.fetched, device.brought) == ([], [])
    assert device.streams_of("copy_") == [0] * len(LAYOUT), "one copy of each, and none to a place beside"


def test_a_delta_is_committed_on_the_device(device: Traffic):
    swap = SparseSwap(placed())
    bits = swap.bits_of(LAYOUT[1])
    assert (bits.device, bits.dtype, len(bits)) == (CUDA, torch.int16, 35)
    places = torch.empty(3, dtype=torch.int64, device=CUDA)
    swap.stage_delta([(bits, places, torch.empty(3, dtype=torch.int16, device=CUDA))])
    device.forget()
    swap.commit()
    assert (device.fetched, device.brought) == ([], [])
    assert device.streams_of("index_copy_") == [0]


def test_the_digests_of_a_policy_come_to_the_host_all_at_once_and_the_policy_does_not(device: Traffic):
    sealed = seal(1, policy(CUDA), LAYOUT)
    assert sealed.digest_kind is DigestKind.SUMS
    assert device.fetched == ["numbers int64[2, 2]"]
    assert 0 not in {stream for stream, name in device.launched if name in ("sum", "arange")}, "passes do not wait for digests"
    device.forget()
    verify(sealed, policy(CUDA), name="s")
    assert device.fetched == ["numbers int64[2, 2]"]


def test_what_runs_beside_forward_passes_has_one_stream_whose_memory_it_uses_again(device: Traffic):
    for version in (1, 2, 3):
        seal(version, policy(CUDA), LAYOUT)
    assert len({stream for stream, name in device.launched if name == "sum"}) == 1


class _Memory:
    """A sender of buffers on the device."""

    def __init__(self) -> None:
        self.offered: dict[str, tuple[torch.Tensor, str, bytes]] = {}

    def make(self, number: int, num_bytes: int) -> WeightBuffer:
        return WeightBuffer(name=f"buffer-{number}", memory=torch.zeros(num_bytes, dtype=torch.uint8, device=CUDA))

    def offer(self, buffer: WeightBuffer, manifest: Manifest, encoded: bytes) -> None:
        self.offered[buffer.name] = buffer.memory, manifest.payload_digest, encoded

    def close(self) -> None: ...

    def fetch(self, name: str, digest: str, spare: Any) -> Payload:
        memory, _, encoded = self.offered[name]
        manifest = open_manifest(encoded, digest=digest, name=name)
        return Payload(manifest=manifest, data=memory[: manifest.num_bytes])


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> _Memory:
    memory = _Memory()
    monkeypatch.setattr(publishing, "open_sender", lambda *_, **__: memory)
    return memory


def publisher_of(folder: Path, *, sends_deltas: bool = False) -> Publisher:
    weights = {name: torch.nn.Parameter(torch.empty(shape, device=CUDA)) for name, (shape, _) in SHAPES.items()}
    found = Publisher(
        lambda: weights, tied_names=frozenset(), run_folder=folder, deadline_s=1.0, sends_deltas=sends_deltas, for_devices=sends_deltas
    )
    found.fix_layout(LAYOUT, transport="cuda_ipc")
    return found


def test_a_policy_is_published_on_the_device_beside_the_next_step(
    device: Traffic, sender: _Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    publisher = publisher_of(tmp_path)
    monkeypatch.setattr(publisher, "publish", device.in_a_thread(publisher.publish))
    device.forget()
    sent: list[Any] = []
    with AsyncPublisher(publisher, sharded=None, send=sent.append, timeline=timeline_of(CUDA)) as beside:
        beside.begin(1)
        beside.wait()
    assert [one.version for one in sent] == [1]
    assert device.fetched == ["numbers int64[2, 2]"], "its digests alone"
    assert device.brought == []
    assert 0 not in device.streams_of("copy_"), "training's stream is not told to copy"


def test_what_was_published_on_a_device_is_staged_and_committed_there(device: Traffic, sender: _Memory, tmp_path: Path):
    published = publisher_of(tmp_path).publish(1)
    assert published is not None
    receiver = WeightReceiver(CopySwap(placed()), layout=LAYOUT, receiver=sender)
    device.forget()
    receiver.stage(StageWeights(version=1, buffer=published.buffer, digest=published.digest))
    receiver.commit()
    assert device.fetched == ["numbers int64[2, 2]"]
    assert device.brought == []


@pytest.mark.parametrize("kind", [CopySwap, SparseSwap])
def test_changes_in_a_devices_memory_are_brought_to_the_host_once_to_be_read(kind: type[CopySwap], device: Traffic, sender: _Memory):
    """They are made-up numbers here, so that their digest is another one: what is refused has been read."""
    whole = seal(2, policy("cpu"), LAYOUT)
    changes = msgspec.structs.replace(whole, num_bytes=100, base_version=1, payload_digest="another")
    buffer, encoded = sender.make(0, 4096), encode(changes)
    sender.offer(buffer, changes, encoded)
    receiver = WeightReceiver(kind(placed()), layout=LAYOUT, receiver=sender)
    device.forget()
    with pytest.raises(WeightsError, match="digest of its 100 bytes of changes is"):
        receiver.stage(StageWeights(version=2, buffer=buffer.name, digest=digest_of(encoded)))
    assert device.fetched == ["_to_copy uint8[100]"]


def test_a_whole_policy_of_a_trainer_that_sends_changes_is_proved_on_the_device(device: Traffic, sender: _Memory, tmp_path: Path):
    """It is sealed on the host, where policies are compared, and has the device's digests beside the host's."""
    published = publisher_of(tmp_path, sends_deltas=True).publish(1)
    assert published is not None
    receiver = WeightReceiver(SparseSwap(placed()), layout=LAYOUT, receiver=sender)
    device.forget()
    with contextlib.suppress(WeightsError):  # the sums are made-up numbers
        receiver.stage(StageWeights(version=1, buffer=published.buffer, digest=published.digest))
    assert device.fetched == ["numbers int64[2, 2]"]


def test_changes_are_proved_where_the_model_is(device: Traffic, sender: _Memory):
    """One number for all tensors comes to the host, and what the model holds does not."""
    whole = with_sums(seal(2, policy("cpu"), LAYOUT), {tensor.name: "0" * 32 for tensor in LAYOUT})
    receiver, swap = WeightReceiver(SparseSwap(placed()), layout=LAYOUT, receiver=sender), SparseSwap(placed())
    device.forget()
    with pytest.raises(WeightsError, match=r"2 of 2 tensors of policy 2: a .* published was 0"):
        receiver._stage_sparse(CHANGES, swap, manifest=msgspec.structs.replace(whole, base_version=1), name="s")
    assert device.fetched == ["numbers int64[2, 2]"]
    assert all(one.startswith("_to_copy int") for one in device.brought), "places and new bits alone"
    assert 0 not in {stream for stream, name in device.launched if name in ("sum", "clone", "index_copy_")}, "passes do not wait"
