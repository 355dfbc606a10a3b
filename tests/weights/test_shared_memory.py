"""Slots in shared memory: who may write when, who may read, and what is left behind."""

import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipelinerl.errors import PeerSilent, WeightsError
from pipelinerl.weights.shared_memory import Slot, SlotPool, attach
from pipelinerl.weights.slots import FOLDER, run_token, unlink_slots

SIZE = 5000


@pytest.fixture
def token() -> Iterator[str]:
    token = secrets.token_hex(8)
    yield token
    unlink_slots(token)


@pytest.fixture
def pool(token: str) -> Iterator[SlotPool]:
    pool = SlotPool(token, num_bytes=SIZE)
    yield pool
    pool.close()


def _publish(pool: SlotPool, version: int) -> Slot:
    slot = pool.acquire(0.0)
    assert slot is not None
    slot.buffer.fill_(version)
    pool.publish(slot, version=version)
    return slot


def test_a_slot_is_never_rewritten_before_it_is_released(pool: SlotPool) -> None:
    slots = [_publish(pool, version) for version in (1, 2, 3)]
    with pytest.raises(PeerSilent) as caught:
        pool.acquire(0.01)
    for version, slot in enumerate(slots, start=1):
        assert f"{slot.name} (policy {version})" in str(caught.value)
    pool.release(slots[1].name)
    assert pool.acquire(0.0) is slots[1]
    assert slots[0].buffer.eq(1).all()
    assert slots[2].buffer.eq(3).all()


def test_the_latest_policy_is_never_handed_out_even_when_released(pool: SlotPool) -> None:
    first = _publish(pool, 1)
    pool.release(first.name)
    others = [pool.acquire(0.0), pool.acquire(0.0)]
    assert first not in others
    with pytest.raises(PeerSilent):
        pool.acquire(0.01)
    assert others[0] is not None
    pool.publish(others[0], version=2)
    assert pool.acquire(0.0) is first


def test_a_waiting_writer_is_woken_by_a_release(pool: SlotPool) -> None:
    slots = [_publish(pool, version) for version in (1, 2, 3)]
    release = threading.Timer(0.05, pool.release, (slots[0].name,))
    release.start()
    started = time.monotonic()
    assert pool.acquire(20.0) is slots[0]
    assert time.monotonic() - started < 10
    release.join()


def test_a_waiting_writer_is_woken_by_giving_up(pool: SlotPool) -> None:
    for version in (1, 2, 3):
        _publish(pool, version)
    give_up = threading.Timer(0.05, pool.give_up)
    give_up.start()
    assert pool.acquire(20.0) is None
    give_up.join()


def test_a_release_of_what_nobody_reads_is_refused(pool: SlotPool) -> None:
    slot = _publish(pool, 1)
    pool.release(slot.name)
    with pytest.raises(WeightsError, match="was released before"):
        pool.release(slot.name)
    with pytest.raises(WeightsError, match="not a slot of this trainer"):
        pool.release("pipelinerl-other-0")


def test_readers_see_the_very_bytes_also_after_the_name_is_gone(pool: SlotPool) -> None:
    slot = _publish(pool, 7)
    seen = attach(slot.name, SIZE)
    slot.buffer[4] = 9
    pool.close()
    assert (int(seen[3]), int(seen[4]), len(seen)) == (7, 9, SIZE)
    with pytest.raises(WeightsError, match="cannot open"):
        attach(slot.name, SIZE)


def test_a_reader_that_writes_is_killed_by_the_kernel(pool: SlotPool) -> None:
    slot = _publish(pool, 7)
    program = f"from pipelinerl.weights.shared_memory import attach; attach({slot.name!r}, {SIZE})[0] = 1"
    assert subprocess.run([sys.executable, "-c", program], timeout=100, check=False).returncode == -11
    assert int(slot.buffer[0]) == 7


def test_slots_belong_to_their_owner_alone_and_go_at_close(pool: SlotPool, token: str) -> None:
    slot = _publish(pool, 1)
    state = (FOLDER / slot.name).stat()
    assert (state.st_mode & 0o777, state.st_size) == (0o600, SIZE)
    pool.close()
    assert not list(FOLDER.glob(f"pipelinerl-{token}-*"))


def test_slots_of_a_dead_run_with_the_same_token_are_removed(token: str) -> None:
    stale = FOLDER / f"pipelinerl-{token}-2"
    stale.write_bytes(b"old")
    SlotPool(token, num_bytes=SIZE)
    assert not stale.exists()


@pytest.mark.parametrize(
    "name", ["../etc/passwd", "pipelinerl-a-0/../../x", "/pipelinerl-a-0", "pipelinerl-a", "other-a-0", "pipelinerl-a-0\n"]
)
def test_a_name_that_is_no_slot_is_refused(name: str) -> None:
    with pytest.raises(WeightsError, match="not the name of a slot"):
        attach(name, SIZE)


def test_a_slot_of_another_size_is_refused(pool: SlotPool) -> None:
    slot = _publish(pool, 1)
    with pytest.raises(WeightsError, match=f"has {SIZE} bytes, expected {SIZE + 1}"):
        attach(slot.name, SIZE + 1)


def test_a_link_in_the_place_of_a_slot_is_refused(token: str, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"x" * SIZE)
    name = f"pipelinerl-{token}-0"
    os.symlink(tmp_path / "target", FOLDER / name)
    with pytest.raises(WeightsError, match="cannot open"):
        attach(name, SIZE)


def test_too_little_shared_memory_is_said_before_a_byte_is_written(token: str) -> None:
    pool = SlotPool(token, num_bytes=1 << 50)
    with pytest.raises(WeightsError, match=r"no room for pipelinerl-.* of 1125899906842624 bytes in /dev/shm: \d+ bytes free"):
        pool.acquire(0.0)
    assert not list(FOLDER.glob(f"pipelinerl-{token}-*"))


def test_a_trainer_that_starts_again_takes_other_names(token: str) -> None:
    """Engines keep slots mapped by name: under an old name they would read the dead trainer's bytes."""
    code = (
        f"from pipelinerl.weights.shared_memory import SlotPool; pool = SlotPool({token!r}, num_bytes=8);"
        " print(pool.acquire(1.0).name, pool.acquire(1.0).name)"
    )
    lives = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() for _ in range(2)]
    assert len({name for names in lives for name in names}) == 4
    assert [path.name for path in FOLDER.glob(f"pipelinerl-{token}-*")] != lives[0], "the first life's are removed"
    unlink_slots(token)


def test_token_follows_the_run_folder(tmp_path: Path) -> None:
    assert run_token(tmp_path / "a") == run_token(tmp_path / "b" / ".." / "a") != run_token(tmp_path / "b")


def test_an_empty_policy_has_a_slot_too(token: str) -> None:
    pool = SlotPool(token, num_bytes=0)
    slot = pool.acquire(0.0)
    assert slot is not None
    assert torch.equal(attach(slot.name, 0), slot.buffer)
    pool.close()
