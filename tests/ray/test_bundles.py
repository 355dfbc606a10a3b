"""What a run asks a Ray cluster for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config import Config
from pipelinerl.config.file import parse
from pipelinerl.errors import ConfigError
from pipelinerl.launch.ray.prepare import bundles_in, command_of, prepare
from pipelinerl.launch.roles import roles_of


def config_of(folder: Path, **sections: Any) -> Config:
    tree = {"model": {"path": "m"}, "data": {"source": "p"}, "reward": [{"function": "r:f"}], "run": {"folder": str(folder)}}
    return parse(tree | sections, origin="test")


def test_a_node_is_a_bundle_with_its_processes_cores_gpus_and_labels(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        engine={"count": 8},
        trainer={"ranks": 16, "parallel": {"shard": 16}},
        ray={
            **{
                "trainer_nodes": 2,
                "engine_nodes": 2,
                "scorer_nodes": 1,
                "gpus_per_node": 8,
                "engine_gpus_per_node": 4,
                "cpus_per_node": 64,
            },
            **{"trainer_labels": {"ray.io/accelerator-type": "H100"}, "engine_labels": {"ray.io/accelerator-type": "L40S"}},
        },
    )
    bundles = bundles_in(prepare(config, resume=None), config)
    assert [(bundle.roles, bundle.resources, bundle.labels) for bundle in bundles] == [
        (("orchestrator", "trainer-0"), {"CPU": 64, "GPU": 8}, {"ray.io/accelerator-type": "H100"}),
        (("trainer-1",), {"CPU": 64, "GPU": 8}, {"ray.io/accelerator-type": "H100"}),
        (("engines-0",), {"CPU": 64, "GPU": 4}, {"ray.io/accelerator-type": "L40S"}),
        (("engines-1",), {"CPU": 64, "GPU": 4}, {"ray.io/accelerator-type": "L40S"}),
        (("scorer-0",), {"CPU": 64}, {}),
    ]
    assert str(bundles[3]) == "node 3 (engines-1; CPU 64, GPU 4, ray.io/accelerator-type=L40S)"


def test_a_node_starts_the_command_lines_that_a_local_run_starts(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run_folder = prepare(config, resume=None)
    (bundle,) = bundles_in(run_folder, config)
    assert bundle.roles == tuple(role.name for role in roles_of(config, run_folder))
    assert command_of(run_folder, 3, 0) == (
        *(sys.executable, "-m", "pipelinerl.launch.ray", "--run-folder", str(run_folder), "--attempt", "3", "--node", "0"),
    )


def test_nodes_with_too_few_gpus_are_refused_and_leave_no_folder(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with pytest.raises(ConfigError, match=r"node 0, of ray\.gpus_per_node = 1: "):
        prepare(config_of(runs, engine={"count": 2}, ray={"gpus_per_node": 1}), resume=None)
    with pytest.raises(ConfigError, match=r"node 1, of ray\.engine_gpus_per_node = 1: "):
        prepare(config_of(runs, engine={"count": 2}, ray={"gpus_per_node": 8, "engine_gpus_per_node": 1, "engine_nodes": 1}), resume=None)
    assert not runs.exists()
