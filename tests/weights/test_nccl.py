"""The protocol around NCCL: buckets, deadlines, and who hears of a peer that has left; over a stand-in that, like NCCL, says nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.transport.rendezvous import RendezvousClient, RendezvousServer
from pipelinerl.weights import nccl
from pipelinerl.weights.base import num_bytes, plan_layout
from pipelinerl.weights.buffer_pool import WeightBufferPool
from pipelinerl.weights.manifest import seal
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


def test_a_policy_goes_through_both_buckets_at_once(monkeypatch: pytest.MonkeyPatch):
    """One call for all of it: a call ends when its last bucket has arrived, and parts of a bucket's size would go one after the other."""
    size = nccl.BUCKET_BYTES + 1000
    sizes: list[int] = []
    send = nccl._Channel.send
    monkeypatch.setattr(nccl._Channel, "send", lambda self, tensor: (sizes.append(tensor.nbytes), send(self, tensor))[1])
    layout = plan_layout({"a": torch.zeros(size, dtype=torch.uint8)})
    sender = nccl.sender(StandInNccl(), deadline_s=20.0)
    pool = WeightBufferPool(sender, num_bytes=num_bytes(layout))
    buffer = pool.acquire(1.0)
    assert buffer is not None
    digest = pool.publish(buffer, seal(1, buffer.memory, layout))
    receiver = nccl.receiver(StandInNccl(), deadline_s=20.0)
    receiver.fetch(buffer.name, digest, lambda manifest: torch.zeros(size, dtype=torch.uint8))
    receiver.close()
    pool.close()
    assert sizes.count(size) == 1, sizes


class _Noted:
    """A communicator that notes what it is asked, and for whose work nobody waits."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def bucket(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def send(self, part: torch.Tensor) -> Any:
        self.asked.append("begun")

    receive = send

    def is_done(self, work: Any) -> bool:
        self.asked.append("done")
        return True

    def abort(self) -> None:
        raise AssertionError


@pytest.mark.parametrize("end", ["send", "receive"])
def test_the_second_bucket_is_under_way_before_the_first_is_waited_for(monkeypatch: pytest.MonkeyPatch, end: str):
    monkeypatch.setattr(nccl, "BUCKET_BYTES", 8)
    noted: Any = _Noted()
    silent: Any = None
    getattr(nccl._Channel(noted, line=silent, deadline_s=1.0, forget=noted.abort), end)(torch.zeros(30, dtype=torch.uint8))
    assert noted.asked == ["begun", "begun", "done", "begun", "done", "begun", "done", "done"]


class CountingNccl(StandInNccl):
    """Counts the communicators that an end enters."""

    def __init__(self) -> None:
        self.num_entered = 0

    def connect(self, unique_id: bytes, rank: int) -> nccl.Communicator:
        self.num_entered += 1
        return super().connect(unique_id, rank)


def test_one_communicator_serves_policy_after_policy_until_one_of_them_is_refused():
    trainer, engine = CountingNccl(), CountingNccl()
    layout = plan_layout({"a": torch.zeros(300, dtype=torch.uint8)})
    pool = WeightBufferPool(nccl.sender(trainer, deadline_s=20.0), num_bytes=num_bytes(layout), max_buffers=9)
    receiver = nccl.receiver(engine, deadline_s=20.0)

    def travel(version: int, *, is_another: bool = False) -> None:
        buffer = pool.acquire(1.0)
        assert buffer is not None
        buffer.memory.fill_(version)
        digest = pool.publish(buffer, seal(version, buffer.memory, layout))
        found = receiver.fetch(
            buffer.name, "0" * 32 if is_another else digest, lambda manifest: torch.zeros(num_bytes(layout), dtype=torch.uint8)
        )
        assert bool((found.data == version).all())

    for version in (1, 2, 3):
        travel(version)
    assert (trainer.num_entered, engine.num_entered) == (1, 1)
    with pytest.raises(WeightsError, match="announced was 0000"):
        travel(4, is_another=True)
    travel(5)
    travel(6)
    assert (trainer.num_entered, engine.num_entered) == (2, 2)
    receiver.close()
    pool.close()


class _Refused(Exception):
    """What stands for the driver: the call has passed CuPy's own checks."""


class _Nccl:
    """CuPy's module as versions 13.6 (`tuple`) and 14.2 (`bytes`) were seen to answer: name given, and name taken."""

    def __init__(self, form: type) -> None:
        self.form = form
        self.name = bytes(range(128, 256))

    def get_unique_id(self) -> object:
        return self.name if self.form is bytes else tuple(part - 256 for part in self.name)

    def NcclCommunicator(self, num: int, name: object, rank: int) -> None:
        if type(name) is not self.form:
            raise TypeError(f"Argument 'commId' has incorrect type (expected {self.form.__name__}, got {type(name).__name__})")
        assert (num, rank, name) == (2, 1, self.get_unique_id())
        raise _Refused


@pytest.mark.parametrize("form", [tuple, bytes])
def test_a_communicators_name_goes_back_in_the_form_that_this_cupy_takes(form: type):
    cupy = _Nccl(form)
    assert nccl.unique_id_of(cupy) == cupy.name
    with pytest.raises(_Refused):
        nccl.communicator_of(cupy, cupy.name, 1)
    with pytest.raises(RuntimeError, match=r"takes no communicator's name of 128 bytes: .*'commId'"):
        nccl.communicator_of(_Nccl(list), cupy.name, 1)


@pytest.mark.filterwarnings("ignore::UserWarning:cupy")
def test_the_real_cupy_takes_its_arguments_up_to_the_driver():
    """Without a device NCCL itself fails; with one, the wait for the other end would have no end, so a device's machine leaves it out."""
    cupy = pytest.importorskip("cupy.cuda.nccl", reason="CuPy is not installed here: it needs a machine with a GPU")
    if not cupy.available or torch.cuda.is_available():
        pytest.skip("CuPy without NCCL, or a machine with a device")
    with pytest.raises(cupy.NcclError, match="CUDA"):
        nccl.communicator_of(cupy, nccl.unique_id_of(cupy), 0)
