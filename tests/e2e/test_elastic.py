"""The rule of elastic roles has devices of real processes change, and the orchestrator is killed in the middle. Engines and trainer have no
model, so that steps take half a second and a change a few."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.file import load
from pipelinerl.demo.settings import demo_config, make_demo_model
from pipelinerl.launch.run_folder import make_run_folder
from pipelinerl.observe.lines import read_journals
from pipelinerl.runtime.membership import ScaleFolder, State
from pipelinerl.runtime.trainer_ranks import Phase
from scripts.chaos import victims
from tests import processes

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]
LOAD_S = 90.0
PLUGINS = Path(__file__).parents[2] / "scripts" / "chaos" / "plugins.py"
LAUNCHER = """
    import asyncio, dataclasses, sys
    from pathlib import Path
    from pipelinerl.config.file import load_run
    from pipelinerl.launch import run_launcher, trainer_starts
    from pipelinerl.launch.roles import Role, joined_engines, roles_of
    from pipelinerl.runtime.lease import held
    folder = Path(folder)
    config = load_run(folder)
    def without_model(role):
        words = list(role.command)
        if role.name.startswith("engines"):
            words[2] = "scripts.chaos.growing_engine"
        return dataclasses.replace(role, command=tuple(words), begins_early=False)
    def trainer(ranks):
        words = (sys.executable, "-m", "scripts.chaos.ranks", "--run-folder", str(folder), "--ranks", str(ranks))
        return Role(name="trainer", command=words)
    roles = tuple(trainer(1) if role.name == "trainer" else without_model(role) for role in roles_of(config, folder))
    trainer_starts.trainer_of = lambda config, run_folder: trainer(config.trainer.ranks)
    run_launcher.joined_engines = lambda *given, **named: without_model(joined_engines(*given, **named))
    with held(folder) as lease:
        asyncio.run(run_launcher.launcher_of(config, roles, folder, lease=lease).run())
"""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Path]:
    """A live run with three engines and one rank of the trainer."""
    settings = demo_config(folder=tmp_path, seed=0)
    make_demo_model(tmp_path / "demo-model", seed=0)
    overrides = ["trainer.steps=1000000", "trainer.cores=[]", "trainer.silent_after_s=30", "checkpoint.every=1000", "evaluation.every=0"]
    overrides += ['engine.kind="fake"', "engine.count=3", "engine.cores=[]", "engine.max_running=4", "pipeline.elastic=true"]
    overrides += ["batch.groups_per_step=2", "rollout.group_size=4", "model.max_tokens=512", "rollout.max_tokens=480"]
    overrides += [f'data.source="{PLUGINS}:prompts"', f'reward=[{{function = "{PLUGINS}:reward"}}]', "run.restart_wait_s=0.1"]
    config = load(settings, overrides=overrides)
    config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"source": None})})
    folder = make_run_folder(config).absolute()
    with processes.launched(LAUNCHER, folder, within_s=LOAD_S):
        yield folder


def wait_until(claim: Callable[[], bool], *, what: str) -> None:
    processes.wait_until(claim, what=what, within_s=LOAD_S)


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_journals(folder) if line["kind"] == kind]


def decided(folder: Path) -> list[tuple[str, int, int]]:
    return [(line["word"], line["engines_then"], line["trainer_then"]) for line in lines(folder, "roles") if line["word"] != "stays"]


def phase_of(folder: Path) -> Phase | None:
    found = ScaleFolder(folder).trainer()
    return found and found.phase


def has(folder: Path) -> tuple[int, int]:
    """Live engines, and ranks of the trainer."""
    members, trainer = ScaleFolder(folder).members(), ScaleFolder(folder).trainer()
    assert members is not None
    assert trainer is not None
    return sum(one.state is State.LIVE for one in members.members), trainer.ranks


def trains_on(folder: Path, *, num_steps: int) -> None:
    before = len(lines(folder, "step"))
    wait_until(lambda: len(lines(folder, "step")) >= before + num_steps, what="the run stands still")


def test_a_change_that_the_rule_ordered_outlives_the_orchestrator_and_devices_go_back_once_answers_are_long(live: Path) -> None:
    wait_until(lambda: phase_of(live) is Phase.STARTING, what="no engine becomes a rank")
    (orchestrator,) = victims.find("orchestrator", live)
    os.kill(orchestrator, signal.SIGKILL)
    wait_until(lambda: "taken" in {word for word, *_ in decided(live)}, what="nobody goes on with the change")
    assert decided(live) == [("begins", 2, 2), ("taken", 2, 2)], "it was carried out once"
    wait_until(lambda: has(live) == (2, 2), what="the folder does not say who is there")  # it follows the journal, by a write to the disk
    trains_on(live, num_steps=3)
    remembered = ScaleFolder(live).roles()
    assert remembered is not None
    assert (remembered.epoch, remembered.num_switches) == (1, 0), "a change of which one orchestrator has seen a part says nothing"
    assert remembered.first_s is not None
    (live / "long").touch()
    wait_until(lambda: decided(live)[2:] == [("begins", 3, 1), ("taken", 3, 1)], what=f"no rank becomes an engine: {decided(live)}")
    wait_until(lambda: has(live) == (3, 1), what="the folder does not say who is there")
    trains_on(live, num_steps=1)
    done = [line["step"] for line in lines(live, "step")]
    assert done == sorted(set(done)), "no step is trained again"
    assert not lines(live, "violation")
    checked = subprocess.run([sys.executable, "-m", "pipelinerl.checker", str(live)], capture_output=True, text=True, check=False)
    assert "every promise was kept" in checked.stdout, checked.stdout
