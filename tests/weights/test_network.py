"""Where NCCL listens: on loopback, unless weights may leave the machine by it; then on what leads to where they go."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config import WeightsSection
from pipelinerl.engine.environment import set_environment
from pipelinerl.errors import ConfigError
from pipelinerl.runtime.network import address_of, device_of
from pipelinerl.weights.network import nccl_settings
from tests import processes


def outside() -> tuple[str, str]:
    """An interface of this machine beside loopback, and its address."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(ConfigError):  # it has no address
            if name != "lo":
                return name, address_of(name)
    pytest.skip("this machine has no interface but loopback")


def run_folder(folder: Path, *, orchestrator_at: str) -> Path:
    (folder / "endpoints").mkdir()
    for role in ("engine", "trainer"):
        endpoint = {"address": f"tcp://{orchestrator_at}:9", "server_key": "k" * 40}
        (folder / "endpoints" / f"{role}.json").write_text(json.dumps(endpoint))
    return folder


def settings(folder: Path, role: str, *, environment: dict[str, str] | None = None, has_gpu: bool = True, **weights: Any) -> dict[str, str]:
    section = WeightsSection(**weights)
    return nccl_settings(section, folder, role, deadline_s=5.0, environment=environment or {}, has_gpu=has_gpu)


@pytest.mark.parametrize("role", ["engine", "trainer"])
def test_nccl_listens_where_weights_leave_the_machine(tmp_path: Path, role: str):
    device, address = outside()
    folder = run_folder(tmp_path, orchestrator_at=address)
    for transport in ("auto", "nccl"):
        assert settings(folder, role, transport=transport) == {"NCCL_SOCKET_IFNAME": device}


@pytest.mark.parametrize("role", ["engine", "trainer"])
def test_nccl_stays_on_loopback_where_no_weights_leave_by_it(tmp_path: Path, role: str):
    _, address = outside()
    folder = run_folder(tmp_path, orchestrator_at=address)
    for transport in ("shared_memory", "cuda_ipc", "files", "gloo"):
        assert settings(folder, role, transport=transport) == {"NCCL_SOCKET_IFNAME": "lo"}
    assert settings(folder, role, has_gpu=False) == {"NCCL_SOCKET_IFNAME": "lo"}


def test_a_run_of_one_machine_stays_on_loopback(tmp_path: Path):
    folder = run_folder(tmp_path, orchestrator_at="127.0.0.1")
    assert settings(folder, "engine") == settings(folder, "trainer") == {"NCCL_SOCKET_IFNAME": "lo"}


def test_the_trainers_own_address_towards_engines_and_what_the_user_has_set_come_first(tmp_path: Path):
    device, address = outside()
    folder = run_folder(tmp_path, orchestrator_at="127.0.0.1")
    assert settings(folder, "trainer", address=address) == {"NCCL_SOCKET_IFNAME": device}
    assert settings(folder, "engine", address=address) == {"NCCL_SOCKET_IFNAME": "lo"}, "it is the trainer's"
    assert settings(folder, "trainer", address=address, environment={"NCCL_SOCKET_IFNAME": "ib0"}) == {}


@pytest.mark.parametrize("is_of_run", [True, False])
def test_an_engine_of_no_run_keeps_nccl_on_loopback_and_one_of_a_run_leaves_it_open(is_of_run: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", {"VLLM_RPC_BASE_PATH": "/tmp"})
    set_environment(num_ranks=2, is_of_run=is_of_run)
    assert os.environ["GLOO_SOCKET_IFNAME"] == device_of("127.0.0.1")
    assert os.environ.get("NCCL_SOCKET_IFNAME") == (None if is_of_run else "lo")


def test_ranks_of_one_machine_get_the_interface_of_the_road_and_gloos_stays(tmp_path: Path):
    program = """
        import os
        os.environ.pop("NCCL_SOCKET_IFNAME", None); os.environ.pop("GLOO_SOCKET_IFNAME", None)
        from trainer.parallel.ranks import meeting_in_memory
        with meeting_in_memory({"NCCL_SOCKET_IFNAME": "ib0"}) as (where, files):
            open(folder + "/said", "w").write(where["NCCL_SOCKET_IFNAME"] + " " + where["GLOO_SOCKET_IFNAME"] + "\\n")
    """
    subprocess.run(processes.program(program, folder=tmp_path), check=True, cwd=Path(__file__).parents[2])
    assert (tmp_path / "said").read_text() == "ib0 lo\n"
