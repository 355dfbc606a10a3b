"""A real Slurm on this machine: submit, hit the limit, save, requeue, go on, finish; one W&B run; nobody exits before the others.

Two slurmd stand for two nodes, the second on a machine of its own where one can be made (`far`). But for one test the run is a stand-in
(`stand_in`): what is tested is Slurm's side, from the script to the supervisors. That one is a real run without a model: real orchestrator,
scorer and transport, fake engines on the far machine, and the trainer of the chaos rehearsals.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.file import load, load_run, parse, write_run
from pipelinerl.demo.settings import demo_config, make_demo_model
from pipelinerl.launch.slurm.submit import prepare
from pipelinerl.observe.lines import read_journals
from pipelinerl.runtime.membership import Member, ScaleFolder, State
from scripts.chaos import victims
from tests.observe.tracking.wandb_file import history
from tests.processes import wait_until
from tests.slurm import cluster as slurm
from tests.slurm import far

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.skipif(slurm.why_not() is not None, reason=str(slurm.why_not()))]

ROOT = Path(__file__).parents[2]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
LONG = "10"
"""Minutes. Within less than three, Slurm's own signal, which comes up to a minute early, could meet a job that is slow."""


@pytest.fixture(scope="module")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    with slurm.cluster(tmp_path_factory.mktemp("slurm"), is_apart=far.why_not() is None) as found:
        yield found


@pytest.fixture
def cluster(_cluster: slurm.Cluster) -> Iterator[slurm.Cluster]:
    """Free of the jobs of a test that failed: the next one's would wait for their end."""
    yield _cluster
    _cluster.cancel_all()


def job(
    folder: Path,
    *,
    steps: int,
    pace_s: float = 0.02,
    holds: tuple[int, ...] = (),
    breaks: str = "",
    tracking: tuple[str, ...] = (),
    **settings: Any,
) -> Path:
    """A prepared run folder whose processes are stand-ins."""
    tree = {
        "model": {"path": "m"},
        "data": {"source": "p.jsonl"},
        "reward": [{"function": "r:f"}],
        "run": {"folder": str(folder), "name": "stand-in"},
        "engine": {"count": 2},
        "tracking": {"to": tracking},
        "slurm": {"cpus_per_node": 1, "time": LONG, "save_s": 20, **settings},
    }
    run_folder = prepare(parse(tree, origin="test")).parent
    names = [role["name"] for role in json.loads((run_folder / "roles.json").read_text())]
    stand_in = [sys.executable, "-m", "tests.slurm.stand_in", str(run_folder)]
    (run_folder / "roles.json").write_text(json.dumps([{"name": name, "command": [*stand_in, name]} for name in names]))
    (run_folder / "stand_in.json").write_text(json.dumps({"steps": steps, "pace_s": pace_s, "holds": holds, "break": breaks}))
    return run_folder


def rehearsal(folder: Path) -> Path:
    """A prepared run folder of the demo, with fake engines on a node of their own and a trainer without a model."""
    settings = demo_config(folder=folder, seed=0)
    make_demo_model(folder / "demo-model", seed=0)
    source = ROOT / "scripts" / "chaos" / "plugins.py"
    overrides = ["run.name=rehearsal", "trainer.steps=1000000", "batch.groups_per_step=4", "checkpoint.every=5", "evaluation.every=0"]
    overrides += ["evaluation.limit=4", 'engine.kind="fake"', "engine.count=2", "engine.cores=[]", "engine.max_running=16"]
    overrides += [f'data.source="{source}:prompts"', f'reward=[{{function = "{source}:reward"}}]']
    overrides += ["slurm.cpus_per_node=1", "slurm.save_s=20", f"slurm.time={LONG}", "slurm.engine_nodes=1"]
    run_folder = prepare(load(settings, overrides=overrides)).parent
    roles = json.loads((run_folder / "roles.json").read_text())
    trainer = next(role for role in roles if role["name"] == "trainer")
    trainer["command"] = [sys.executable, "-m", "scripts.chaos.trainer", "--run-folder", str(run_folder)]
    (run_folder / "roles.json").write_text(json.dumps(roles))
    return run_folder


def submit(cluster: slurm.Cluster, run_folder: Path, *options: str) -> str:
    return cluster.run("sbatch", "--parsable", *options, str(run_folder / "job.sbatch"))


def wait(cluster: slurm.Cluster, number: str, *states: str, timeout_s: float = 120) -> dict[str, str]:
    end = time.monotonic() + timeout_s
    while True:
        state = cluster.state(number)
        if state["JobState"] in states:
            return state
        is_too_late = state["JobState"] in ENDED or time.monotonic() > end
        assert not is_too_late, f"job {number} is {state['JobState']} ({state.get('Reason')}), awaited {states}"
        time.sleep(0.2)


@contextlib.contextmanager
def nothing_starts(cluster: slurm.Cluster) -> Iterator[None]:
    """While the block runs: a job that is requeued stays pending, and its run folder as it was left."""
    cluster.run("scontrol", "update", "PartitionName=test", "State=DOWN")
    try:
        yield
    finally:
        cluster.run("scontrol", "update", "PartitionName=test", "State=UP")


def steps_of(run_folder: Path) -> list[int]:
    return [line["step"] for line in read_journals(run_folder) if line["kind"] == "step"]


def supervisors(run_folder: Path, attempt: int) -> str:
    """What the supervisors of all nodes said; both slurmd run on this machine, so their files carry its name and the task's number."""
    return "".join(path.read_text() for path in sorted((run_folder / "logs" / f"attempt-{attempt}").glob("supervisor-*.log")))


def said(run_folder: Path, number: str) -> str:
    return (run_folder / "logs" / f"slurm-{number}.log").read_text()


def test_a_run_that_meets_its_limit_again_and_again_saves_goes_on_and_finishes_in_one_wandb_run(cluster: slurm.Cluster, tmp_path: Path):
    run_folder = job(tmp_path, steps=40, holds=(5, 10, 15, 20), tracking=("wandb",), engine_nodes=1)
    number = submit(cluster, run_folder)
    for steps in (5, 10, 15):
        wait_for_steps(run_folder, steps)
        cluster.run("scancel", "--batch", "--signal=USR1", number)
    wait_for_steps(run_folder, 20)
    # A tracker that is ended while it starts leaves the rest to `pipelinerl track`; the last one must have got as far as to open W&B's run.
    began, opened = run_folder / "logs" / "track-wandb.log", run_folder / "tracking" / "wandb.json"
    wait_until(lambda: opened.exists() and opened.stat().st_mtime > began.lstat().st_mtime, what="nobody tracks the last attempt")
    (run_folder / "go-on").touch()
    state = wait(cluster, number, *ENDED)
    text = said(run_folder, number)
    assert state["JobState"] == "COMPLETED", text
    assert state["Restarts"] == "3"
    assert text.count("saved; requeue") == 3
    assert steps_of(run_folder) == list(range(40)), "every step once, in order, over four attempts"
    for attempt in range(4):
        assert f"attempt {attempt}: job {number}, restart {attempt}" in text
        for name, node in (("orchestrator", 0), ("engines", 1), ("track-wandb", 0), ("supervisor-*-0", 0), ("supervisor-*-1", 1)):
            (log,) = (run_folder / "logs" / f"attempt-{attempt}").glob(f"{name}.log")
            assert log.read_text().startswith(f"attempt {attempt}, restart {attempt}, job {number}, node {node}"), name
    assert f"attempt 3, restart 3, job {number}, node 1" in (run_folder / "logs" / "launcher.log").read_text()
    assert [row["progress/step"] for row in history(run_folder) if "reward/all/mean" in row] == list(range(40))
    names = {path.name.rpartition("-")[2] for path in run_folder.glob("tracking/wandb/offline-run-*")}
    assert names == {json.loads((run_folder / "tracking" / "wandb.json").read_text())["id"]}


def test_the_limit_itself_saves_and_requeues(cluster: slurm.Cluster, tmp_path: Path):
    # The limit is one minute; 45 s before it the supervisor saves on its own account, whether or not Slurm's signal has come.
    run_folder = job(tmp_path, steps=10_000, pace_s=0.2, time="1", save_s=45)
    number = submit(cluster, run_folder)
    wait(cluster, number, "RUNNING")
    with nothing_starts(cluster):
        wait(cluster, number, "PENDING", *ENDED)
        text = said(run_folder, number)
        assert "attempt 0 saved; requeue" in text
        steps, checkpoint = steps_of(run_folder), run_folder / "checkpoint.json"
        assert steps == list(range(len(steps)))
        # Slurm may send its signal up to a minute early: then it meets an orchestrator that is only starting, and has nothing to save.
        assert (json.loads(checkpoint.read_text())["step"] if checkpoint.exists() else 0) == len(steps)
        cluster.cancel_all()


def test_a_process_that_fails_on_one_node_ends_the_job_on_all_after_the_others_saved_and_nothing_is_requeued(
    cluster: slurm.Cluster, tmp_path: Path
):
    run_folder = job(tmp_path, steps=10_000, pace_s=0.2, breaks="engines", engine_nodes=1)
    number = submit(cluster, run_folder)
    state = wait(cluster, number, *ENDED)
    assert state["JobState"] == "FAILED"
    assert state["Restarts"] == "0"
    assert "requeue" not in said(run_folder, number)
    assert json.loads((run_folder / "checkpoint.json").read_text())["step"] == len(steps_of(run_folder)) > 0, "the other node saved first"
    assert "engines ended with exit code 3" in supervisors(run_folder, 0)


def test_a_chain_goes_on_in_the_next_job_and_stops_when_the_run_is_finished(cluster: slurm.Cluster, tmp_path: Path):
    run_folder = job(tmp_path, steps=30, holds=(5,), at_limit="chain")
    first, second, third = (submit(cluster, run_folder) for _ in range(3))
    wait_for_steps(run_folder, 5)
    cluster.run("scancel", "--batch", "--signal=USR1", first)
    for number in (first, second, third):
        assert wait(cluster, number, *ENDED)["JobState"] == "COMPLETED"
    assert steps_of(run_folder) == list(range(30))
    assert "the run is finished" in supervisors(run_folder, 2)


def test_scorers_on_nodes_of_their_own_belong_to_the_same_job_and_the_next_one_goes_on_with_them(cluster: slurm.Cluster, tmp_path: Path):
    run_folder = job(tmp_path, steps=20, holds=(5, 19), scorer_nodes=1)
    first = submit(cluster, run_folder)
    wait_for_steps(run_folder, 5)
    cluster.run("scancel", "--batch", "--signal=USR1", first)
    assert wait(cluster, first, *ENDED)["JobState"] == "COMPLETED", said(run_folder, first)
    (second,) = re.findall(r"attempt 0 saved; submitted again as job (\d+)", said(run_folder, first))
    end = time.monotonic() + 120
    while not (run_folder / "logs" / "attempt-1" / "scorer-0.log").exists():  # else the run could end before the second node begins
        assert time.monotonic() < end, said(run_folder, second)
        time.sleep(0.1)
    (run_folder / "go-on").touch()
    assert wait(cluster, second, *ENDED)["JobState"] == "COMPLETED", said(run_folder, second)
    assert steps_of(run_folder) == list(range(20))
    for attempt, number in ((0, first), (1, second)):
        log = (run_folder / "logs" / f"attempt-{attempt}" / "scorer-0.log").read_text()
        assert log.startswith(f"attempt {attempt}, restart 0, job {int(number)}")
        assert "node 1: scorer-0" in supervisors(run_folder, attempt)


def wait_for_steps(run_folder: Path, number: int) -> None:
    journal, end = run_folder / "journal" / "orchestrator.jsonl", time.monotonic() + 180
    while not journal.exists() or len(steps_of(run_folder)) < number:
        assert time.monotonic() < end, supervisors(run_folder, 0)
        time.sleep(0.1)


def test_a_real_run_over_two_machines_outlives_its_orchestrator_is_requeued_and_keeps_every_promise(cluster: slurm.Cluster, tmp_path: Path):
    run_folder = rehearsal(tmp_path)
    number = submit(cluster, run_folder)
    wait_for_steps(run_folder, 3)
    (orchestrator,) = victims.find("orchestrator", run_folder)
    os.kill(orchestrator, signal.SIGKILL)
    wait_until(lambda: not victims.is_alive(orchestrator), what="an orchestrator outlives SIGKILL")
    wait_for_steps(run_folder, len(steps_of(run_folder)) + 3)
    listening = json.loads((run_folder / "endpoints" / "engine.json").read_text())["address"]
    with nothing_starts(cluster):
        cluster.run("scancel", "--batch", "--signal=USR1", number)
        wait(cluster, number, "PENDING")
        num_steps = max(steps_of(run_folder)) + 1 + 10
        write_run(run_folder, load_run(run_folder, overrides=[f"trainer.steps={num_steps}"]))  # as `--resume` would
    assert wait(cluster, number, *ENDED)["JobState"] == "COMPLETED", said(run_folder, number) + supervisors(run_folder, 1)
    assert said(run_folder, number).count("saved; requeue") == 1
    verdict = subprocess.run([sys.executable, "-m", "pipelinerl.checker", str(run_folder)], capture_output=True, text=True, check=False)
    assert "every promise was kept" in verdict.stdout, verdict.stdout
    assert f"2 restarts, {num_steps} steps" in verdict.stdout
    if far.why_not() is None:
        assert listening.startswith(f"tcp://{far.HERE}:"), "where the far machine reaches it, and nowhere else"
        assert f"node 1 ({far.NAME})" in (run_folder / "logs" / "attempt-0" / "engines.log").read_text()


def test_engines_join_a_live_run_by_a_job_of_their_own_and_the_run_outlives_its_end(cluster: slurm.Cluster, tmp_path: Path):
    run_folder = rehearsal(tmp_path)
    submit(cluster, run_folder)
    wait_for_steps(run_folder, 3)
    command = [sys.executable, "-m", "pipelinerl", "scale", str(run_folder), "engines=3", "--submit"]
    told = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, check=False)
    (number,) = re.findall(r"job: (\d+)", told.stdout) or [told.stderr]
    wait_until(lambda: member(run_folder, 2).state is State.LIVE, what=f"nobody joins: {told.stdout}", within_s=120)
    cluster.run("scancel", number)
    wait_until(lambda: member(run_folder, 2).state is State.LOST, what="a job that was cancelled is not missed")
    assert member(run_folder, 2).reason == f"Slurm job {number} was told to end"
    wait_for_steps(run_folder, len(steps_of(run_folder)) + 3)
    verdict = subprocess.run([sys.executable, "-m", "pipelinerl.checker", str(run_folder)], capture_output=True, text=True, check=False)
    assert "every promise was kept" in verdict.stdout, verdict.stdout


def member(run_folder: Path, engine_id: int) -> Member:
    found = ScaleFolder(run_folder).members()
    return next(one for one in found.members if one.engine_id == engine_id) if found is not None else pytest.fail("no engines are told of")
