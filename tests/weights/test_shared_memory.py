"""Slots in shared memory: who may read them, and what is left behind."""

import faulthandler
import multiprocessing
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.weights.manifest import Manifest
from pipelinerl.weights.road import Slot
from pipelinerl.weights.shared_memory import SharedMemory, SharedMemoryReceiver, attach
from pipelinerl.weights.slots import FOLDER, run_token, unlink_slots

SIZE = 5000
FORKED = multiprocessing.get_context("fork")
"""Processes that need not import torch again, which takes longer than the tests."""


def run_forked(work: Callable[[], None]) -> int | None:
    """Have a process do it; its exit code."""
    process = FORKED.Process(target=work)
    process.start()
    process.join()
    return process.exitcode


@pytest.fixture
def token() -> Iterator[str]:
    token = secrets.token_hex(8)
    yield token
    unlink_slots(token)


@pytest.fixture
def slot(token: str) -> Slot:
    slot = SharedMemory(token).make(0, SIZE)
    slot.buffer.fill_(7)
    return slot


def test_readers_see_the_very_bytes_also_after_the_name_is_gone(slot: Slot, token: str) -> None:
    seen = attach(slot.name)
    slot.buffer[4] = 9
    unlink_slots(token)
    assert (int(seen[3]), int(seen[4]), len(seen)) == (7, 9, SIZE)
    with pytest.raises(WeightsError, match="cannot open"):
        attach(slot.name)


def test_a_reader_that_writes_is_killed_by_the_kernel(slot: Slot) -> None:
    def write() -> None:
        faulthandler.disable()
        attach(slot.name)[0] = 1

    assert run_forked(write) == -signal.SIGSEGV
    assert int(slot.buffer[0]) == 7


def test_slots_belong_to_their_owner_alone_and_go_at_close(token: str) -> None:
    memory = SharedMemory(token)
    slot = memory.make(3, SIZE)
    memory.offer(slot, Manifest(version=1, proofs=(), num_bytes=SIZE), b"manifest")
    state = (FOLDER / slot.name).stat()
    assert (state.st_mode & 0o777, state.st_size) == (0o600, SIZE)
    assert {path.name for path in FOLDER.glob(f"pipelinerl-{token}-*")} == {slot.name, f"{slot.name}.manifest"}
    memory.close()
    memory.close()
    assert not list(FOLDER.glob(f"pipelinerl-{token}-*"))


def test_slots_of_a_dead_run_with_the_same_token_are_removed(token: str) -> None:
    for name in ("2", "2.manifest", "2.draft"):
        (FOLDER / f"pipelinerl-{token}-{name}").write_bytes(b"old")
    SharedMemory(token)
    assert not list(FOLDER.glob(f"pipelinerl-{token}-*"))


@pytest.mark.parametrize(
    "name", ["../etc/passwd", "pipelinerl-a-0/../../x", "/pipelinerl-a-0", "pipelinerl-a", "other-a-0", "pipelinerl-a-0\n"]
)
def test_a_name_that_is_no_slot_is_refused(name: str) -> None:
    with pytest.raises(WeightsError, match="not the name of a slot"):
        attach(name)
    with pytest.raises(WeightsError, match="not the name of a slot"):
        SharedMemoryReceiver().fetch(name, "digest", lambda manifest: torch.zeros(0))


def test_a_link_in_the_place_of_a_slot_is_refused(token: str, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"x" * SIZE)
    name = f"pipelinerl-{token}-0"
    os.symlink(tmp_path / "target", FOLDER / name)
    with pytest.raises(WeightsError, match="cannot open"):
        attach(name)


def test_too_little_shared_memory_is_said_before_a_byte_is_written(token: str) -> None:
    with pytest.raises(WeightsError, match=r"no room for pipelinerl-.* of 1125899906842624 bytes in /dev/shm: \d+ bytes free"):
        SharedMemory(token).make(0, 1 << 50)
    assert not list(FOLDER.glob(f"pipelinerl-{token}-*"))


def test_a_trainer_that_starts_again_takes_other_names(token: str) -> None:
    """Engines keep slots mapped by name: under an old name they would read the dead trainer's bytes."""
    ours, theirs = FORKED.Pipe()

    def live() -> None:
        slots = SharedMemory(token)
        theirs.send([slots.make(0, 8).name, slots.make(1, 8).name])

    lives = []
    for _ in range(2):
        run_forked(live)
        lives.append(ours.recv())
    assert len({name for names in lives for name in names}) == 4
    assert [path.name for path in FOLDER.glob(f"pipelinerl-{token}-*")] != lives[0], "the first life's are removed"
    unlink_slots(token)


def test_token_follows_the_run_folder(tmp_path: Path) -> None:
    assert run_token(tmp_path / "a") == run_token(tmp_path / "b" / ".." / "a") != run_token(tmp_path / "b")
