"""Who may write a buffer, and when; on buffers of plain memory."""

import threading
import time

import pytest
import torch

from pipelinerl.errors import PeerSilent, WeightsError
from pipelinerl.weights.buffer_pool import WeightBufferPool, num_buffers_for
from pipelinerl.weights.manifest import Manifest, digest_of, encode
from pipelinerl.weights.transport import WeightBuffer


class Memory:
    """A sender without a reader."""

    def __init__(self) -> None:
        self.offered: dict[str, bytes] = {}
        self.refuses = False

    def make(self, number: int, num_bytes: int) -> WeightBuffer:
        return WeightBuffer(name=f"buffer-{number}", memory=torch.zeros(num_bytes, dtype=torch.uint8))

    def offer(self, buffer: WeightBuffer, manifest: Manifest, encoded: bytes) -> None:
        if self.refuses:
            raise WeightsError("the disk is full")
        self.offered[buffer.name] = encoded

    def close(self) -> None:
        self.offered.clear()


@pytest.fixture
def pool() -> WeightBufferPool:
    return WeightBufferPool(Memory(), num_bytes=100)


def manifest(version: int) -> Manifest:
    return Manifest(version=version, proofs=(), num_bytes=100)


def publish(pool: WeightBufferPool, version: int) -> WeightBuffer:
    buffer = pool.acquire(0.0)
    assert buffer is not None
    buffer.memory.fill_(version)
    pool.publish(buffer, manifest(version))
    return buffer


def test_a_buffer_is_never_rewritten_before_it_is_released(pool: WeightBufferPool):
    buffers = [publish(pool, version) for version in (1, 2, 3)]
    with pytest.raises(PeerSilent) as caught:
        pool.acquire(0.01)
    for version, buffer in enumerate(buffers, start=1):
        assert f"{buffer.name} (policy {version})" in str(caught.value)
    pool.release(buffers[1].name)
    assert pool.acquire(0.0) is buffers[1]
    assert buffers[0].memory.eq(1).all()
    assert buffers[2].memory.eq(3).all()


def test_the_latest_policy_is_never_handed_out_even_when_released(pool: WeightBufferPool):
    first = publish(pool, 1)
    pool.release(first.name)
    others = [pool.acquire(0.0), pool.acquire(0.0)]
    assert first not in others
    with pytest.raises(PeerSilent):
        pool.acquire(0.01)
    assert others[0] is not None
    pool.publish(others[0], manifest(2))
    assert pool.acquire(0.0) is first


def test_a_waiting_writer_is_woken_by_a_release(pool: WeightBufferPool):
    buffers = [publish(pool, version) for version in (1, 2, 3)]
    release = threading.Timer(0.05, pool.release, (buffers[0].name,))
    release.start()
    started = time.monotonic()
    assert pool.acquire(20.0) is buffers[0]
    assert time.monotonic() - started < 10
    release.join()


def test_a_waiting_writer_is_woken_by_giving_up(pool: WeightBufferPool):
    for version in (1, 2, 3):
        publish(pool, version)
    give_up = threading.Timer(0.05, pool.give_up)
    give_up.start()
    assert pool.acquire(20.0) is None
    give_up.join()


def test_a_release_of_what_nobody_reads_is_refused(pool: WeightBufferPool):
    buffer = publish(pool, 1)
    pool.release(buffer.name)
    with pytest.raises(WeightsError, match="was released before"):
        pool.release(buffer.name)
    with pytest.raises(WeightsError, match="not a buffer of this trainer"):
        pool.release("buffer-9")


def test_what_is_announced_is_the_digest_of_what_lies_in_the_buffer():
    memory = Memory()
    pool = WeightBufferPool(memory, num_bytes=100)
    buffer = pool.acquire(0.0)
    assert buffer is not None
    announced = pool.publish(buffer, manifest(4))
    assert memory.offered == {buffer.name: encode(manifest(4))}
    assert announced == digest_of(memory.offered[buffer.name])


def test_a_policy_that_could_not_be_offered_leaves_the_one_before_the_latest_and_its_buffer_free():
    memory = Memory()
    pool = WeightBufferPool(memory, num_bytes=100)
    first = publish(pool, 1)
    pool.release(first.name)
    memory.refuses = True
    with pytest.raises(WeightsError, match="the disk is full"):
        publish(pool, 2)
    assert publish_to(pool) is not first, "policy 1 is still the latest"


def publish_to(pool: WeightBufferPool) -> WeightBuffer | None:
    return pool.acquire(0.0)


def test_slow_engines_at_different_policies_do_not_hold_up_the_trainer():
    """Two engines: one serves 1 and fetches 2 for ever, the other serves 3 and fetches 4; 5 can be written."""
    pool = WeightBufferPool(Memory(), num_bytes=1, max_buffers=num_buffers_for(2))
    for version in (1, 2, 3, 4):
        publish(pool, version)
    assert pool.acquire(0.0) is not None


def test_a_buffer_that_is_written_in_place_is_handed_out_again_though_it_is_the_latest():
    pool = WeightBufferPool(Memory(), num_bytes=100, in_place=True)
    names = set()
    for version in (0, 1, 2):
        buffer = pool.acquire(0.0)
        assert buffer is not None
        names.add(buffer.name)
        pool.publish(buffer, manifest(version))
    assert names == {"buffer-0"}
    assert pool.acquire(0.0) is not None
    with pytest.raises(PeerSilent, match="being written"):
        pool.acquire(0.0)
