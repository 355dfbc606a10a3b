"""Engines that another job starts: which they are, what each is told, and when they begin again."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config import Config
from pipelinerl.config.file import parse
from pipelinerl.errors import ConfigError, PeerSilent
from pipelinerl.launch import joining
from pipelinerl.launch.gpus import place
from pipelinerl.launch.joining import joining_engines
from pipelinerl.launch.launcher import Launcher
from pipelinerl.launch.roles import Role, engines_elsewhere, peers_of, roles_of
from pipelinerl.launch.run_folder import fill
from pipelinerl.runtime.devices import Gpu
from pipelinerl.runtime.parts import engines_of
from pipelinerl.transport.endpoint import Endpoint, publish_endpoint
from pipelinerl.weights.shared_names import FOLDER, run_token
from tests import processes

ENGINES = Role(name="engines-elsewhere-0", command=(), engine_ids=(1,))


def config_of(folder: Path, **sections: Any) -> Config:
    tree = {"model": {"path": "m"}, "data": {"source": "p"}, "reward": [{"function": "r:f"}], "run": {"folder": str(folder)}}
    return parse(tree | sections, origin="test")


def test_engines_here_and_elsewhere_are_together_all_of_them_each_once() -> None:
    here = [engines_of(f"{part}/2", None, num_here=5, num_elsewhere=3) for part in range(2)]
    elsewhere = [engines_of(None, f"{part}/2", num_here=5, num_elsewhere=3) for part in range(2)]
    assert [list(one) for one in (*here, *elsewhere)] == [[0, 1], [2, 3, 4], [5], [6, 7]]


def test_each_job_deals_its_own_gpus_to_its_own_engines(tmp_path: Path) -> None:
    gpus = [Gpu(index=index, uuid=f"GPU-{index}", name="", total_bytes=0, free_bytes=0) for index in range(2)]
    config = config_of(tmp_path, engine={"count": 3, "elsewhere": 2}, trainer={"ranks": 1})
    _, here = place(config, roles_of(config, tmp_path), gpus)
    assert sorted(here.taken) == ["engine-0", "trainer"]
    (role,), there = place(config, (engines_elsewhere(config, tmp_path, "0/1"),), gpus, is_alone=False)
    assert sorted(there.taken) == ["engine-1", "engine-2"]
    assert role.name == "engines-elsewhere-0"
    assert role.command[-6:] == ("--elsewhere", "0/1", "--gpus", "GPU-0", "--gpus", "GPU-1")
    assert {"engine-0", "engine-1", "engine-2"} < set(peers_of(config)), "each has a key"


def test_a_run_whose_engines_are_all_elsewhere_starts_none(tmp_path: Path) -> None:
    config = config_of(tmp_path, engine={"count": 2, "elsewhere": 2})
    assert [role.name for role in roles_of(config, tmp_path)] == ["orchestrator", "scorer-0", "trainer"]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"engine": {"count": 2, "elsewhere": 3}}, "engine.elsewhere is 3 but engine.count is 2, which counts them, too"),
        (
            {"engine": {"count": 3, "elsewhere": 2}, "slurm": {"engine_nodes": 2}},
            "slurm.engine_nodes is 2 but engine.count is 3, 2 of them elsewhere",
        ),
        ({"engine": {"elsewhere": 1}, "pipeline": {"placement": "colocated"}}, "their devices would not be the trainer's"),
    ],
)
def test_more_elsewhere_than_there_are_is_refused(sections: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(tmp_path, **sections)


def test_a_run_that_leaves_no_engines_to_others_and_a_wrong_part_are_named(tmp_path: Path) -> None:
    fill(tmp_path / "none", config_of(tmp_path))
    with pytest.raises(ConfigError, match=r"leaves no engines to others: engine\.elsewhere is 0\. Start, or resume, the run with"):
        joining_engines(tmp_path / "none", "0/1")
    fill(tmp_path / "two", config_of(tmp_path, engine={"count": 3, "elsewhere": 2}))
    for part in ("2/2", "0/3", "1", "a/b"):
        with pytest.raises(ConfigError, match=f"--part {part}: expected K/N"):
            joining_engines(tmp_path / "two", part)


def test_engines_begin_again_once_another_orchestrator_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "LOOK_EVERY_S", 0.001)
    path = tmp_path / "endpoints" / "engine.json"
    publish_endpoint(path, Endpoint(address="tcp://127.0.0.1:1", server_key="k" * 40, closing_message=b"stop"))
    with pytest.raises(PeerSilent, match="to go on; it was saved, or its orchestrator is gone"):
        asyncio.run(joining._wait_for_next(tmp_path, ENGINES, deadline_s=0.02))
    again = threading.Timer(0.02, publish_endpoint, args=(path, Endpoint(address="tcp://127.0.0.1:1", server_key="k" * 40)))
    again.start()
    asyncio.run(joining._wait_for_next(tmp_path, ENGINES, deadline_s=processes.PATIENCE_S))
    again.join()


@pytest.mark.process
@pytest.mark.parametrize("role", ["engines-elsewhere-0", "trainer"])
def test_only_the_trainers_launcher_removes_policies_from_memory(tmp_path: Path, role: str) -> None:
    buffer = FOLDER / f"pipelinerl-{run_token(tmp_path)}-1-0"
    buffer.touch()
    try:
        asyncio.run(Launcher((Role(name=role, command=processes.program("pass")),), tmp_path).run())
        assert buffer.exists() == (role != "trainer")
    finally:
        buffer.unlink(missing_ok=True)
