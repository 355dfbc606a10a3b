"""Who may write a slot, and when; on slots of plain memory."""

import threading
import time

import pytest
import torch

from pipelinerl.errors import PeerSilent, WeightsError
from pipelinerl.weights.buffer_pool import SlotPool, num_slots_for
from pipelinerl.weights.manifest import Manifest, digest_of, encode
from pipelinerl.weights.transport import Slot


class Memory:
    """A medium without a reader."""

    def __init__(self) -> None:
        self.offered: dict[str, bytes] = {}
        self.refuses = False

    def make(self, number: int, num_bytes: int) -> Slot:
        return Slot(name=f"slot-{number}", buffer=torch.zeros(num_bytes, dtype=torch.uint8))

    def offer(self, slot: Slot, manifest: Manifest, encoded: bytes) -> None:
        if self.refuses:
            raise WeightsError("the disk is full")
        self.offered[slot.name] = encoded

    def close(self) -> None:
        self.offered.clear()


@pytest.fixture
def pool() -> SlotPool:
    return SlotPool(Memory(), num_bytes=100)


def manifest(version: int) -> Manifest:
    return Manifest(version=version, proofs=(), num_bytes=100)


def publish(pool: SlotPool, version: int) -> Slot:
    slot = pool.acquire(0.0)
    assert slot is not None
    slot.buffer.fill_(version)
    pool.publish(slot, manifest(version))
    return slot


def test_a_slot_is_never_rewritten_before_it_is_released(pool: SlotPool):
    slots = [publish(pool, version) for version in (1, 2, 3)]
    with pytest.raises(PeerSilent) as caught:
        pool.acquire(0.01)
    for version, slot in enumerate(slots, start=1):
        assert f"{slot.name} (policy {version})" in str(caught.value)
    pool.release(slots[1].name)
    assert pool.acquire(0.0) is slots[1]
    assert slots[0].buffer.eq(1).all()
    assert slots[2].buffer.eq(3).all()


def test_the_latest_policy_is_never_handed_out_even_when_released(pool: SlotPool):
    first = publish(pool, 1)
    pool.release(first.name)
    others = [pool.acquire(0.0), pool.acquire(0.0)]
    assert first not in others
    with pytest.raises(PeerSilent):
        pool.acquire(0.01)
    assert others[0] is not None
    pool.publish(others[0], manifest(2))
    assert pool.acquire(0.0) is first


def test_a_waiting_writer_is_woken_by_a_release(pool: SlotPool):
    slots = [publish(pool, version) for version in (1, 2, 3)]
    release = threading.Timer(0.05, pool.release, (slots[0].name,))
    release.start()
    started = time.monotonic()
    assert pool.acquire(20.0) is slots[0]
    assert time.monotonic() - started < 10
    release.join()


def test_a_waiting_writer_is_woken_by_giving_up(pool: SlotPool):
    for version in (1, 2, 3):
        publish(pool, version)
    give_up = threading.Timer(0.05, pool.give_up)
    give_up.start()
    assert pool.acquire(20.0) is None
    give_up.join()


def test_a_release_of_what_nobody_reads_is_refused(pool: SlotPool):
    slot = publish(pool, 1)
    pool.release(slot.name)
    with pytest.raises(WeightsError, match="was released before"):
        pool.release(slot.name)
    with pytest.raises(WeightsError, match="not a slot of this trainer"):
        pool.release("slot-9")


def test_what_is_announced_is_the_digest_of_what_lies_in_the_slot():
    memory = Memory()
    pool = SlotPool(memory, num_bytes=100)
    slot = pool.acquire(0.0)
    assert slot is not None
    announced = pool.publish(slot, manifest(4))
    assert memory.offered == {slot.name: encode(manifest(4))}
    assert announced == digest_of(memory.offered[slot.name])


def test_a_policy_that_could_not_be_offered_leaves_the_one_before_the_latest_and_its_slot_free():
    memory = Memory()
    pool = SlotPool(memory, num_bytes=100)
    first = publish(pool, 1)
    pool.release(first.name)
    memory.refuses = True
    with pytest.raises(WeightsError, match="the disk is full"):
        publish(pool, 2)
    assert publish_to(pool) is not first, "policy 1 is still the latest"


def publish_to(pool: SlotPool) -> Slot | None:
    return pool.acquire(0.0)


def test_slow_engines_at_different_policies_do_not_hold_up_the_trainer():
    """Two engines: one serves 1 and fetches 2 for ever, the other serves 3 and fetches 4; 5 can be written."""
    pool = SlotPool(Memory(), num_bytes=1, max_slots=num_slots_for(2))
    for version in (1, 2, 3, 4):
        publish(pool, version)
    assert pool.acquire(0.0) is not None
