"""A real Ray cluster of several nodes, and a run of stand-in processes on it. Skipped where Ray is not installed."""

from __future__ import annotations

import contextlib
import json
import signal
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

COMMAND = """
    import json, pathlib, sys
    from pipelinerl.cli import clusters
    from pipelinerl.launch import preflight
    from pipelinerl.launch.ray import prepare
    record = prepare.record_roles

    def record_stand_ins(config, section, run_folder):
        record(config, section, run_folder)
        roles = json.loads((run_folder / "roles.json").read_text())
        for role in roles:
            role["command"] = [sys.executable, "-m", "tests.slurm.stand_in", str(run_folder), role["name"]]
        (run_folder / "roles.json").write_text(json.dumps(roles))
        (run_folder / "stand_in.json").write_text(json.dumps({"steps": 6, "pace_s": 0.05, "holds": [3]}))
        (run_folder / "checkpoints" / "step-0").mkdir(parents=True, exist_ok=True)
        (run_folder / "checkpoints" / "step-0" / "manifest.json").touch()

    prepare.record_roles, preflight.check, clusters.resolved = record_stand_ins, lambda *_, **__: [], lambda config: config
    clusters.ray(pathlib.Path(settings), resume=resume)
"""
"""`pipelinerl ray`, but for the checks of a model and rows that there are none of, and for what its processes are."""
LEFT = """
    import ray
    ray.init(address=address, log_to_driver=False, configure_logging=False)
    print(ray.available_resources()["CPU"])
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


def command(folder: Path, cluster: RayCluster, *, resume: str | None = None) -> subprocess.Popen[str]:
    """`pipelinerl ray my.toml`, with or without `--resume`."""
    (folder / "my.toml").write_text(
        f'[model]\npath = "m"\n[data]\nsource = "p"\n[[reward]]\nfunction = "r:f"\n[run]\nfolder = "{folder / "runs"}"\n'
        f'[ray]\naddress = "{cluster.address}"\nengine_nodes = 1\ncpus_per_node = 1\nwait_s = 60\nsave_s = 10\n'
    )
    program = processes.program(COMMAND, settings=folder / "my.toml", resume=resume)
    return subprocess.Popen(program, env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def steps_of(folder: Path) -> list[int]:
    """The steps that the run in a folder has journaled."""
    journals = [path.read_text().splitlines() for path in folder.glob("runs/*/journal/orchestrator.jsonl")]
    return [line["step"] for lines in journals for line in map(json.loads, lines) if line["kind"] == "step"]


def left_of(folder: Path) -> list[bytes]:
    """The command lines of processes of a run, and of actors."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes()
            found += [words] if str(folder / "runs").encode() in words or b"ray::Member" in words else []
    return found


def cpus_left(cluster: RayCluster) -> float:
    asked = subprocess.run(
        processes.program(LEFT, address=cluster.address), env=cluster.environment, capture_output=True, text=True, check=False
    )
    return float(asked.stdout or -1)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_ended_leaves_nothing_behind_and_the_next_goes_on(tmp_path: Path, cluster: RayCluster, how: int) -> None:
    with command(tmp_path, cluster) as running:
        processes.wait_until(lambda: len(steps_of(tmp_path)) == 3, what="the run takes no steps", within_s=120)
        assert left_of(tmp_path)
        running.send_signal(how)
        said, _ = running.communicate()
    if how == signal.SIGINT:
        assert running.returncode == 0, said
        assert "saved; `pipelinerl ray " in said
    else:
        assert running.returncode == -signal.SIGKILL
    processes.wait_until(lambda: not left_of(tmp_path), what="processes are left", within_s=60)
    processes.wait_until(lambda: cpus_left(cluster) == 2.0, what="the cluster does not get its cores back", within_s=60)
    with command(tmp_path, cluster, resume="") as running:
        said, _ = running.communicate()
    assert running.returncode == 0, said
    assert "model: " in said
    before = 3 if how == signal.SIGINT else 0
    assert steps_of(tmp_path) == [0, 1, 2, *range(before, 6)], "what was saved is gone on with"
    assert not left_of(tmp_path)
