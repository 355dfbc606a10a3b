"""Published files: whole or not there, readable by anything that reads safetensors, and what a full disk does."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipelinerl.errors import WeightsError
from pipelinerl.messages import Tensor
from pipelinerl.weights.base import num_bytes, plan_layout, views
from pipelinerl.weights.buffer_pool import WeightBufferPool
from pipelinerl.weights.files import FilesSender
from pipelinerl.weights.manifest import seal

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "scalar": torch.tensor(7.0)}
LAYOUT: tuple[Tensor, ...] = plan_layout(TENSORS)


def publish(pool: WeightBufferPool, version: int) -> str:
    buffer = pool.acquire(0.0)
    assert buffer is not None
    for name, view in views(buffer.memory, LAYOUT).items():
        view.copy_(TENSORS[name] + version)
    pool.publish(buffer, seal(version, buffer.memory, LAYOUT))
    return buffer.name


def pool_in(folder: Path) -> WeightBufferPool:
    return WeightBufferPool(FilesSender(folder), num_bytes=num_bytes(LAYOUT))


def test_a_policy_is_a_safetensors_file_that_others_can_load(tmp_path: Path):
    name = publish(pool_in(tmp_path / "weights"), 3)
    assert name == "policy-3.safetensors"
    path = tmp_path / "weights" / name
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[key], TENSORS[key] + 3) for key in TENSORS)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_released_file_goes_when_its_buffer_is_used_again_and_all_go_at_close(tmp_path: Path):
    pool = pool_in(tmp_path)
    names = [publish(pool, version) for version in (1, 2, 3)]
    assert {path.name for path in tmp_path.iterdir()} == set(names), "no draft is left"
    pool.release(names[0])
    assert publish(pool, 4) == "policy-4.safetensors"
    assert {path.name for path in tmp_path.iterdir()} == {f"policy-{version}.safetensors" for version in (2, 3, 4)}
    pool.close()
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_run_left_is_removed_and_other_files_are_not(tmp_path: Path):
    for name in ("policy-9.safetensors", "policy-9.draft", "notes.txt"):
        (tmp_path / name).write_bytes(b"old")
    pool_in(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_a_full_disk_is_said_and_leaves_the_policy_before(tmp_path: Path):
    """The system refuses to let a file grow, in a process of its own, at the second policy."""
    program = f"""
import pathlib, resource, signal
from pipelinerl.errors import WeightsError
from tests.weights.test_files import pool_in, publish
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
pool = pool_in(pathlib.Path({str(tmp_path)!r}))
publish(pool, 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
try:
    publish(pool, 2)
except WeightsError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(sorted(path.name for path in pathlib.Path({str(tmp_path)!r}).iterdir()))
print(publish(pool, 3))
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=100, check=True, capture_output=True, text=True)
    error, left, third = done.stdout.splitlines()
    assert error.startswith(f"cannot write policy 2, {num_bytes(LAYOUT)} bytes, to {tmp_path}/policy-2.safetensors: ")
    assert "engines go on with the policy before" in error
    assert left == "['policy-1.safetensors']"
    assert third == "policy-3.safetensors"


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match=r"cannot make .*/file/weights for published policies"):
        FilesSender(tmp_path / "file" / "weights")
