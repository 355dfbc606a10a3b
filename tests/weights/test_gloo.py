"""The network's transport among real processes: who dies half way harms nobody else."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipelinerl.errors import WeightsError
from pipelinerl.weights import gloo
from pipelinerl.weights.base import num_bytes, plan_layout
from pipelinerl.weights.buffer_pool import WeightBufferPool
from pipelinerl.weights.gloo import CHUNK_BYTES
from pipelinerl.weights.manifest import Manifest, seal, verify

LAYOUT = plan_layout({"a": torch.zeros(3 * CHUNK_BYTES + 1000, dtype=torch.uint8)})
FORKED = multiprocessing.get_context("fork")
"""Processes that need not import torch again, which takes longer than the tests."""


def be_trainer(tell: Connection) -> None:
    """Publish one policy and say where, then wait for the end."""
    pool = WeightBufferPool(gloo.sender(deadline_s=20.0), num_bytes=num_bytes(LAYOUT))
    buffer = pool.acquire(1.0)
    assert buffer is not None
    buffer.memory.fill_(7)
    tell.send((buffer.name, pool.publish(buffer, seal(1, buffer.memory, LAYOUT))))
    tell.recv()


class Trainer:
    """A trainer in a process of its own, with one policy published."""

    def __init__(self) -> None:
        self._line, theirs = FORKED.Pipe()
        self.process = FORKED.Process(target=be_trainer, args=(theirs,))
        self.process.start()
        self.buffer, self.digest = self._line.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    trainer.end()


def spare(manifest: Manifest) -> torch.Tensor:
    return torch.zeros(num_bytes(LAYOUT), dtype=torch.uint8)


def fetch_whole(trainer: Trainer) -> bool:
    payload = gloo.receiver(deadline_s=20.0).fetch(trainer.buffer, trainer.digest, spare)
    verify(payload.manifest, payload.data, name="s")
    return bool(payload.data.eq(7).all())


@pytest.mark.parametrize(("how", "deadline_s"), [(signal.SIGKILL, 100.0), (signal.SIGSTOP, 1.0)], ids=["killed", "stopped"])
def test_a_trainer_that_stops_half_way_is_an_error_within_the_deadline(trainer: Trainer, how: signal.Signals, deadline_s: float):
    def stop_it(manifest: Manifest) -> torch.Tensor:
        assert trainer.process.pid is not None
        os.kill(trainer.process.pid, how)
        return spare(manifest)

    started = time.monotonic()
    with pytest.raises(WeightsError, match=r"cannot fetch a policy from the trainer at 127.0.0.1:\d+, weight buffer 0: .*; not taken"):
        gloo.receiver(deadline_s=deadline_s).fetch(trainer.buffer, trainer.digest, stop_it)
    assert time.monotonic() - started < 60.0


def test_an_engine_that_dies_half_way_holds_up_no_other_and_can_come_again(trainer: Trainer):
    def die(manifest: Manifest) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return spare(manifest)

    engine = FORKED.Process(target=lambda: gloo.receiver().fetch(trainer.buffer, trainer.digest, die))
    engine.start()
    engine.join()
    assert engine.exitcode == -signal.SIGKILL
    started = time.monotonic()
    assert fetch_whole(trainer)
    assert fetch_whole(trainer)
    assert time.monotonic() - started < 15.0


def test_who_does_not_know_the_token_gets_nothing(trainer: Trainer):
    address, _, rest = trainer.buffer.rpartition("/")[0].rpartition("/")
    forged = f"{address}/{'0' * len(rest)}/0"
    with pytest.raises(WeightsError, match="cannot fetch") as caught:
        gloo.receiver(deadline_s=1.0).fetch(forged, trainer.digest, spare)
    assert rest not in str(caught.value)


@pytest.mark.slow
def test_a_stranger_with_the_address_learns_nothing_from_the_store(trainer: Trainer):
    """Torch's own store would list its keys to anybody, and the tokens of buffers in them."""
    assert fetch_whole(trainer)
    address, port = trainer.buffer.split("/")[2].split(":")
    with pytest.raises(RuntimeError):
        dist.TCPStore(address, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1)).list_keys()
    assert fetch_whole(trainer), "and it went on as before"


def test_the_store_keeps_nothing_of_calls_that_went_well():
    layout = plan_layout({"a": torch.zeros(1000, dtype=torch.uint8)})
    host = gloo.sender(deadline_s=10.0)
    pool, receiver = WeightBufferPool(host, num_bytes=num_bytes(layout)), gloo.receiver(deadline_s=10.0)
    buffer = pool.acquire(1.0)
    assert buffer is not None
    digest = pool.publish(buffer, seal(1, buffer.memory, layout))
    for _ in range(3):
        receiver.fetch(buffer.name, digest, lambda manifest: torch.zeros(1000, dtype=torch.uint8))
    pool.close()  # waits for those who answer
    assert host._server._store.values == {}


def test_the_token_stays_out_of_error_messages(trainer: Trainer):
    with pytest.raises(WeightsError, match="announced was ff") as caught:
        gloo.receiver(deadline_s=20.0).fetch(trainer.buffer, "ff", spare)
    assert trainer.buffer.split("/")[-2] not in str(caught.value)


def test_the_trainer_listens_on_its_own_address_alone():
    pool = WeightBufferPool(gloo.sender(), num_bytes=1)
    tables = [Path(path).read_text() for path in ("/proc/net/tcp", "/proc/net/tcp6")]
    listening = [line.split() for table in tables for line in table.splitlines()[1:]]
    buffer = pool.acquire(0.0)
    assert buffer is not None
    port = int(buffer.name.split(":")[2].split("/")[0])
    addresses = {fields[1] for fields in listening if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port}
    assert addresses == {f"0100007F:{port:04X}"}
    pool.close()
    with pytest.raises(WeightsError, match=r"cannot offer weights on weights.address = '192.0.2.1'"):
        gloo.sender("192.0.2.1")


def test_a_line_to_the_trainer_is_used_again_and_not_for_another_trainer():
    layout = plan_layout({"a": torch.zeros(1000, dtype=torch.uint8)})
    receiver = gloo.receiver(deadline_s=10.0)
    pools = [WeightBufferPool(gloo.sender(deadline_s=10.0), num_bytes=num_bytes(layout)) for _ in range(2)]
    lines = []
    for pool in (pools[0], pools[0], pools[1]):
        buffer = pool.acquire(1.0)
        assert buffer is not None
        digest = pool.publish(buffer, seal(1, buffer.memory, layout))
        receiver.fetch(buffer.name, digest, lambda manifest: torch.zeros(1000, dtype=torch.uint8))
        assert receiver._client is not None
        (line,) = receiver._client._idle
        lines.append(line)
    assert lines[0] is lines[1]
    assert lines[2] is not lines[0]
    for pool in pools:
        pool.close()
