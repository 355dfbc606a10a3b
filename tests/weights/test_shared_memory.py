"""Weight buffers in shared memory: who may read them, and what is left behind."""

import contextlib
import faulthandler
import mmap
import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.weights.manifest import Manifest
from pipelinerl.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender, attach, write_beside
from pipelinerl.weights.shared_names import FOLDER, forget_vllm_names, run_token, sweep, unlink_buffers
from pipelinerl.weights.transport import WeightBuffer

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
    unlink_buffers(token)


@pytest.fixture
def buffer(token: str) -> WeightBuffer:
    buffer = SharedMemorySender(token).make(0, SIZE)
    buffer.memory.fill_(7)
    return buffer


def test_readers_see_the_very_bytes_also_after_the_name_is_gone(buffer: WeightBuffer, token: str) -> None:
    seen = attach(buffer.name)
    buffer.memory[4] = 9
    unlink_buffers(token)
    assert (int(seen[3]), int(seen[4]), len(seen)) == (7, 9, SIZE)
    with pytest.raises(WeightsError, match="cannot open"):
        attach(buffer.name)


def test_a_reader_that_writes_is_killed_by_the_kernel(buffer: WeightBuffer) -> None:
    def write() -> None:
        faulthandler.disable()
        attach(buffer.name)[0] = 1

    assert run_forked(write) == -signal.SIGSEGV
    assert int(buffer.memory[0]) == 7


def test_buffers_belong_to_their_owner_alone_and_go_at_close(token: str) -> None:
    memory = SharedMemorySender(token)
    buffer = memory.make(3, SIZE)
    memory.offer(buffer, Manifest(version=1, proofs=(), num_bytes=SIZE), b"manifest")
    state = (FOLDER / buffer.name).stat()
    assert (state.st_mode & 0o777, state.st_size) == (0o600, SIZE)
    assert {path.name for path in FOLDER.glob(f"pipelinerl-{token}-*")} == {
        buffer.name,
        f"{buffer.name}.manifest",
        f"pipelinerl-{token}-{os.getpid()}.owner",
    }
    memory.close()
    memory.close()
    assert not list(FOLDER.glob(f"pipelinerl-{token}-*"))


def test_buffers_of_a_dead_run_with_the_same_token_are_removed(token: str) -> None:
    for name in ("2", "2.manifest", "2.draft"):
        (FOLDER / f"pipelinerl-{token}-{name}").write_bytes(b"old")
    SharedMemorySender(token)
    assert [path.suffix for path in FOLDER.glob(f"pipelinerl-{token}-*")] == [".owner"]


@pytest.mark.parametrize(
    "name", ["../etc/passwd", "pipelinerl-a-0/../../x", "/pipelinerl-a-0", "pipelinerl-a", "other-a-0", "pipelinerl-a-0\n"]
)
def test_a_name_that_is_no_buffer_is_refused(name: str) -> None:
    with pytest.raises(WeightsError, match="not the name of a weight buffer"):
        attach(name)
    with pytest.raises(WeightsError, match="not the name of a weight buffer"):
        SharedMemoryReceiver().fetch(name, "digest", lambda manifest: torch.zeros(0))


def test_a_link_in_the_place_of_a_buffer_is_refused(token: str, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"x" * SIZE)
    name = f"pipelinerl-{token}-0"
    os.symlink(tmp_path / "target", FOLDER / name)
    with pytest.raises(WeightsError, match="cannot open"):
        attach(name)


def test_too_little_shared_memory_is_said_before_a_byte_is_written(token: str) -> None:
    with pytest.raises(WeightsError, match=r"no room for pipelinerl-.* of 1125899906842624 bytes in /dev/shm: \d+ bytes free"):
        SharedMemorySender(token).make(0, 1 << 50)
    assert [path.suffix for path in FOLDER.glob(f"pipelinerl-{token}-*")] == [".owner"]


def test_a_trainer_that_starts_again_takes_other_names(token: str) -> None:
    """Engines keep buffers mapped by name: under an old name they would read the dead trainer's bytes."""
    ours, theirs = FORKED.Pipe()

    def live() -> None:
        buffers = SharedMemorySender(token)
        theirs.send([buffers.make(0, 8).name, buffers.make(1, 8).name])

    lives = []
    for _ in range(2):
        run_forked(live)
        lives.append(ours.recv())
    assert len({name for names in lives for name in names}) == 4
    assert [path.name for path in FOLDER.glob(f"pipelinerl-{token}-*")] != lives[0], "the first life's are removed"
    unlink_buffers(token)


def test_token_follows_the_run_folder(tmp_path: Path) -> None:
    assert run_token(tmp_path / "a") == run_token(tmp_path / "b" / ".." / "a") != run_token(tmp_path / "b")


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_made_is_not(tmp_path: Path) -> None:
    """By a lock of the owner's, which no reused process id and no other container can feign."""
    parent, child = FORKED.Pipe()

    def leave() -> None:
        memory = SharedMemorySender("dead", folder=tmp_path)
        write_beside(memory.make(0, SIZE).name, ".manifest", b"{}", folder=tmp_path)
        child.send("made")
        signal.pause()

    process = FORKED.Process(target=leave)
    process.start()
    assert parent.recv() == "made"
    with contextlib.closing(SharedMemorySender("living", folder=tmp_path)) as living:
        buffer = living.make(0, SIZE)
        assert sweep(folder=tmp_path) == 0, "both owners live"
        process.kill()
        process.join()
        assert sweep(folder=tmp_path) >= SIZE
        assert {path.name.split("-")[1] for path in tmp_path.iterdir()} == {"living"}
        attach(buffer.name, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_sweep_leaves_alone_what_has_no_owner_and_what_is_not_a_plain_file(tmp_path: Path) -> None:
    (tmp_path / "pipelinerl-other-10").touch()
    (tmp_path / "victim").touch()
    (tmp_path / "pipelinerl-link-1.owner").symlink_to(tmp_path / "victim")
    assert sweep(folder=tmp_path) == 0
    assert len(list(tmp_path.iterdir())) == 3


def vllm_buffer(folder: Path, *, age_s: float, name: str = "vllm_dist_0f-tp:0-[0-1]-cpushm_0") -> Path:
    """A file as the ranks of vLLM's engines on CPUs leave them."""
    path = folder / name
    path.write_bytes(bytes(1 << 16))
    os.utime(path, (at := time.time() - age_s, at))
    return path


def test_what_vllms_ranks_left_is_swept_once_nobody_has_it(tmp_path: Path) -> None:
    path = vllm_buffer(tmp_path, age_s=100)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert sweep(folder=tmp_path) == 0, "a living process has mapped it"
    assert sweep(folder=tmp_path) == 1 << 16
    assert not path.exists()


def test_what_vllms_ranks_may_still_be_meeting_by_is_not_swept_nor_what_only_looks_alike(tmp_path: Path) -> None:
    vllm_buffer(tmp_path, age_s=5)
    vllm_buffer(tmp_path, age_s=100, name="vllm_dist_0f.txt")
    vllm_buffer(tmp_path, age_s=100, name="else-cpushm_0")
    (tmp_path / "vllm_dist_1-cpushm_0").symlink_to("else-cpushm_0")
    os.utime(tmp_path / "vllm_dist_1-cpushm_0", (0, 0), follow_symlinks=False)
    before = set(tmp_path.iterdir())
    assert sweep(folder=tmp_path) == 0
    assert set(tmp_path.iterdir()) == before


def test_an_engine_forgets_the_names_of_its_own_buffers_alone(tmp_path: Path) -> None:
    own, others = vllm_buffer(tmp_path, age_s=0), vllm_buffer(tmp_path, age_s=0, name="vllm_dist_0f1-tp:0-[0-1]-cpushm_0")
    forget_vllm_names("vllm_dist_0f", folder=tmp_path)
    assert set(tmp_path.iterdir()) == {others}
    assert not own.exists()
