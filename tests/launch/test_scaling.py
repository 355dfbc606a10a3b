"""Engines that join and leave a live run, with real processes of everything but a model: `pipelinerl scale`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelinerl.config.file import load
from pipelinerl.demo.settings import demo_config, make_demo_model
from pipelinerl.errors import ConfigError
from pipelinerl.launch import scaling
from pipelinerl.launch.run_folder import make_run_folder
from pipelinerl.observe.lines import read_journals
from pipelinerl.runtime.membership import Member, Members, ScaleFolder, StartedBy, State, is_own
from scripts.chaos import victims
from tests import processes

PLUGINS = Path(__file__).parents[2] / "scripts" / "chaos" / "plugins.py"
LAUNCHER = """
    import asyncio, dataclasses, sys
    from pathlib import Path
    from pipelinerl.config.file import load_run
    from pipelinerl.launch.launcher import launcher_of
    from pipelinerl.launch.roles import roles_of
    from pipelinerl.runtime.lease import held
    folder = Path(folder)
    config = load_run(folder)
    trainer = (sys.executable, "-m", "scripts.chaos.trainer", "--run-folder", str(folder))
    roles = tuple(dataclasses.replace(role, command=trainer) if role.name == "trainer" else role for role in roles_of(config, folder))
    with held(folder) as lease:
        asyncio.run(launcher_of(config, roles, folder, lease=lease).run())
"""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Path]:
    """A live run with one engine."""
    settings = demo_config(folder=tmp_path, seed=0)
    make_demo_model(tmp_path / "demo-model", seed=0)
    overrides = ["trainer.steps=1000000", "batch.groups_per_step=4", "evaluation.every=0", "evaluation.limit=4", "checkpoint.every=100"]
    overrides += ['engine.kind="fake"', "engine.count=1", "engine.cores=[]", "engine.max_running=16", "engine.max_count=4"]
    overrides += [f'data.source="{PLUGINS}:prompts"', f'reward=[{{function = "{PLUGINS}:reward"}}]', "run.restart_wait_s=0.1"]
    folder = make_run_folder(load(settings, overrides=overrides)).absolute()
    with subprocess.Popen(processes.program(LAUNCHER, folder=folder)) as launcher:
        try:
            wait_for(folder, 0, State.LIVE)
            yield folder
            launcher.send_signal(signal.SIGINT)
            assert launcher.wait(processes.PATIENCE_S) == 0
        finally:
            launcher.kill()


def member(folder: Path, engine_id: int) -> Member | None:
    found = ScaleFolder(folder).members()
    return next((one for one in found.members if one.engine_id == engine_id), None) if found is not None else None


def wait_for(folder: Path, engine_id: int, state: State) -> Member:
    def is_there() -> bool:
        found = member(folder, engine_id)
        return found is not None and found.state is state

    processes.wait_until(is_there, what=f"engine {engine_id} is not {state}: {member(folder, engine_id)}")
    found = member(folder, engine_id)
    assert found is not None
    return found


def steps(folder: Path) -> int:
    return sum(line["kind"] == "step" for line in read_journals(folder))


def scale(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "pipelinerl", "scale", str(folder), *words)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=processes.PATIENCE_S)


def process_of(folder: Path, engine_id: int) -> int:
    return int((folder / "processes" / f"engine-{engine_id}").read_text().rpartition(" ")[2])


@pytest.mark.process
@pytest.mark.slow
def test_a_live_run_grows_shrinks_and_outlives_an_engine_that_is_killed_while_it_drains(live: Path) -> None:
    grown = scale(live, "engines=3")
    assert grown.returncode == 0, grown.stderr
    for number in (1, 2):
        wait_for(live, number, State.LIVE)
    os.kill(process_of(live, 2), signal.SIGSTOP)  # so that it never ends what it has
    before = steps(live)
    processes.wait_until(lambda: steps(live) >= before + 2, what="the others wait for an engine that was stopped")
    shrunk = scale(live, "engines=1", "--drain-s", "600")
    assert shrunk.returncode == 0, shrunk.stderr
    assert wait_for(live, 1, State.LEFT).reason == "it has ended all that it had"
    stuck = wait_for(live, 2, State.DRAINING)
    assert stuck.started_by is StartedBy.LAUNCHER
    os.kill(process_of(live, 2), signal.SIGKILL)
    assert wait_for(live, 2, State.LEFT).reason == "it ended before it had answered all that it had"
    processes.wait_until(lambda: len(victims.find("engine", live)) == 1, what="an engine that has left goes on")
    before = steps(live)
    processes.wait_until(lambda: steps(live) >= before + 3, what="the run stands still with one engine")
    again = scale(live, "engines=2")
    assert again.returncode == 0, again.stderr
    wait_for(live, 1, State.LIVE)
    for words, said in (
        (("engines=0",), "engines=0: expected 1 to 4"),
        (("engines=5",), "engines=5: expected 1 to 4"),
        (("engines=two",), "engines=two: expected engines=N"),
        (("engines=2", "--submit"), "is not a run under Slurm"),
        (("engines=3", "--elsewhere"), "where no other machine reaches it"),
    ):
        refused = scale(live, *words)
        assert refused.returncode == 1
        assert said in refused.stderr
    checked = subprocess.run([sys.executable, "-m", "pipelinerl.checker", str(live)], capture_output=True, text=True, check=False)
    assert "every promise was kept" in checked.stdout, checked.stdout


def test_what_cannot_be_asked_of_a_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config"):
        scaling.ask(tmp_path, engines=2, drain_s=1.0, started_by=StartedBy.LAUNCHER)


def test_the_orchestrators_record_says_whose_an_engine_is(tmp_path: Path) -> None:
    assert is_own(tmp_path, 0, StartedBy.RUN), "before the orchestrator has spoken"
    members = (
        Member(engine_id=0, state=State.LIVE, started_by=StartedBy.RUN),
        Member(engine_id=1, state=State.LEFT, started_by=StartedBy.RUN),
        Member(engine_id=2, state=State.JOINING, started_by=StartedBy.LAUNCHER, request_id=3),
        Member(engine_id=3, state=State.LOST, started_by=StartedBy.JOB, request_id=3),
    )
    ScaleFolder(tmp_path).publish(Members(members=members, num_wanted=2, count=2))
    own = {kind: [number for number in range(4) if is_own(tmp_path, number, kind)] for kind in StartedBy}
    assert own == {StartedBy.RUN: [0], StartedBy.LAUNCHER: [2], StartedBy.JOB: [3]}
