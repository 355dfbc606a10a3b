"""The protocol around NCCL: buckets, deadlines, and who hears of a peer that has left; over a stand-in that, like NCCL, says nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from pipelinerl.transport.rendezvous import RendezvousClient, RendezvousServer
from pipelinerl.weights import nccl
from pipelinerl.weights.point_to_point import Channel
from pipelinerl.weights.rendezvous_store import RendezvousStore
from tests.contract.device_stand_ins import StandInNccl


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Channel]]:
    """Both ends, with buckets of 64 bytes."""
    monkeypatch.setattr(nccl, "BUCKET_BYTES", 64)
    server = RendezvousServer("127.0.0.1", "token")
    ends: list[Channel] = []

    def meet(rank: int) -> None:
        store = RendezvousStore(RendezvousClient("127.0.0.1", server.port, "token"), timeout=timedelta(seconds=20))
        found = nccl._Connect(StandInNccl())(store, "call", rank, address="127.0.0.1", deadline=timedelta(seconds=20))
        ends.insert(0, found) if rank == 0 else ends.append(found)

    trainer = threading.Thread(target=meet, args=(0,))
    trainer.start()
    meet(1)
    trainer.join()
    yield ends
    for end in ends:
        end.abort()
    server.close()


@pytest.mark.parametrize("num_bytes", [1, 63, 64, 65, 128, 129, 1000])
def test_tensors_of_any_size_arrive_whole_and_in_order(pair: list[Channel], num_bytes: int):
    sent = [torch.randint(0, 256, (num_bytes,), dtype=torch.uint8) for _ in range(3)]
    found = [torch.zeros_like(tensor) for tensor in sent]
    sender = threading.Thread(target=lambda: [pair[0].send(tensor) for tensor in sent])
    sender.start()
    for tensor in found:
        pair[1].receive(tensor)
    sender.join()
    assert all(torch.equal(one, other) for one, other in zip(sent, found, strict=True))


def test_a_peer_that_does_nothing_is_an_error_after_the_deadline(pair: list[Channel]):
    vars(pair[1])["_deadline_s"] = 0.1
    with pytest.raises(RuntimeError, match=r"waited 0\.1 s for the other end to take or send at most 64 bytes"):
        pair[1].receive(torch.zeros(200, dtype=torch.uint8))


def test_who_hangs_up_is_heard_at_once_and_not_after_the_deadline(pair: list[Channel]):
    vars(pair[1])["_deadline_s"] = 60.0
    threading.Timer(0.05, pair[0].abort).start()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="the other end has hung up"):
        pair[1].receive(torch.zeros(200, dtype=torch.uint8))
    assert time.monotonic() - started < 30.0
