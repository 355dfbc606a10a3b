"""A real Ray cluster of several nodes, and a run of stand-in processes on it. Skipped where Ray is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelinerl.config.file import parse
from pipelinerl.launch.ray.prepare import prepare
from tests import processes
from tests.ray.cluster import RayCluster, ray_cluster

pytest.importorskip("ray", reason="Ray is not installed: pip install --no-deps -r scripts/lock/ray.txt")
pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

DRIVER = """
    import asyncio, functools, pathlib, sys
    from pipelinerl.config.file import load_run
    from pipelinerl.launch.placement import nodes_of
    from pipelinerl.launch.ray.attempts import Attempts
    from pipelinerl.launch.ray.cluster import cluster_of
    from pipelinerl.launch.ray.prepare import bundles_in, command_of
    run_folder = pathlib.Path(folder)
    config = load_run(run_folder)
    with cluster_of(config.ray, bundles_in(run_folder, config)) as cluster:
        command = functools.partial(command_of, run_folder)
        say = functools.partial(print, flush=True)
        attempts = Attempts(config.run, run_folder, nodes_of(config.ray), cluster, save_s=5, command=command, say=say)
        code = asyncio.run(attempts.run())
    import ray
    ray.init(address=config.ray.address, log_to_driver=False, configure_logging=False)
    print("left", ray.available_resources()["CPU"])
    sys.exit(code)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as made:
        for _ in range(2):
            made.add_node(cpus=1)
        yield made


def run_of(folder: Path, cluster: RayCluster, *, holds: list[int], cpus: int = 1) -> Path:
    tree = {"model": {"path": "m"}, "data": {"source": "p"}, "reward": [{"function": "r:f"}], "run": {"folder": str(folder)}}
    ray = {"address": cluster.address, "engine_nodes": 1, "cpus_per_node": cpus, "wait_s": 60 if cpus == 1 else 2, "save_s": 10}
    run_folder = prepare(parse(tree | {"ray": ray}, origin="test"), resume=None)
    roles = json.loads((run_folder / "roles.json").read_text())
    for role in roles:
        role["command"] = [sys.executable, "-m", "tests.slurm.stand_in", str(run_folder), role["name"]]
    (run_folder / "roles.json").write_text(json.dumps(roles))
    (run_folder / "stand_in.json").write_text(json.dumps({"steps": 6, "pace_s": 0.05, "holds": holds}))
    return run_folder


def driver(run_folder: Path, cluster: RayCluster) -> subprocess.Popen[str]:
    command = processes.program(DRIVER, folder=run_folder)
    return subprocess.Popen(command, env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def process_of(run_folder: Path, role: str) -> int:
    words = f"tests.slurm.stand_in\0{run_folder}\0{role}\0".encode()
    return next(int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if path.read_bytes().endswith(words))


def test_engines_of_a_lost_node_begin_on_another_and_the_group_is_given_back(tmp_path: Path, cluster: RayCluster) -> None:
    run_folder = run_of(tmp_path, cluster, holds=[3])
    with driver(run_folder, cluster) as running:
        log = run_folder / "logs" / "attempt-0" / "engines.log"
        processes.wait_until(lambda: log.exists() and "started" in log.read_text(), what="no engines start", within_s=120)
        lost = process_of(run_folder, "engines")
        environment = Path(f"/proc/{lost}/environ").read_bytes()
        assert b"RAY_AUTH" not in environment
        assert b"PATH=" in environment
        cluster.kill(cluster.node_of(lost))
        cluster.add_node(cpus=1)
        processes.wait_until(lambda: log.read_text().count("started") == 2, what="no engines start elsewhere", within_s=120)
        (run_folder / "go-on").touch()
        said, _ = running.communicate()
    assert running.returncode == 0, said
    assert "node 1 (engines; CPU 1) is lost: " in said
    assert said.endswith("left 2.0\n")
    assert len(list((run_folder / "logs").glob("attempt-*"))) == 1


def test_a_run_that_the_cluster_has_no_room_for_says_what_it_asked_for_and_what_there_is(tmp_path: Path, cluster: RayCluster) -> None:
    with driver(run_of(tmp_path, cluster, holds=[], cpus=64), cluster) as running:
        said, _ = running.communicate()
    assert running.returncode == 1
    assert "PeerSilent: waited 2 s for room for node 0 (orchestrator, scorer-0, trainer; CPU 64); the cluster has " in said
    assert "(CPU 1, GPU 0)" in said


def test_a_cluster_that_lets_in_who_has_no_token_is_refused(tmp_path: Path, cluster: RayCluster) -> None:
    with ray_cluster(with_token=False) as opened:
        run_folder = run_of(tmp_path, opened, holds=[])
        with driver(run_folder, cluster) as running:
            said, _ = running.communicate()
    assert running.returncode == 1
    assert "lets in who has no token. Whoever reaches a Ray cluster that asks for no token runs code on all of its nodes" in said
