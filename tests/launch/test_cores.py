"""`run.cores` in a run with real processes of everything but a model."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from pipelinerl.config.file import load
from pipelinerl.demo.settings import demo_config, make_demo_model
from pipelinerl.errors import ConfigError
from pipelinerl.launch.run_folder import make_run_folder
from pipelinerl.observe.lines import read_journals
from pipelinerl.runtime.process import keep_to
from tests import processes
from tests.launch.test_scaling import LAUNCHER, PLUGINS
from tests.listeners import tree_of

CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.process
@pytest.mark.skipif(len(CORES) < 2, reason="on a single core everything is bound to it")
def test_orchestrator_scorer_and_rewards_keep_to_their_cores_and_nobody_else_does(tmp_path: Path) -> None:
    settings = demo_config(folder=tmp_path, seed=0)
    make_demo_model(tmp_path / "demo-model", seed=0)
    overrides = ["trainer.steps=1000000", "batch.groups_per_step=4", "evaluation.every=0", f"run.cores=[{CORES[-1]}]"]
    overrides += ['engine.kind="fake"', "engine.cores=[]", "trainer.cores=[]", f'data.source="{PLUGINS}:prompts"']
    folder = make_run_folder(load(settings, overrides=[*overrides, f'reward=[{{function = "{PLUGINS}:reward"}}]'])).absolute()
    with processes.launched(LAUNCHER, folder):
        processes.wait_until(lambda: any(line["kind"] == "step" for line in read_journals(folder)), what="no step was trained")
        commands: dict[int, list[str]] = {}
        bound: set[int] = set()
        for number in tree_of(os.getpid()):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                is_bound = os.sched_getaffinity(number) == {CORES[-1]}
                commands[number] = Path(f"/proc/{number}/cmdline").read_text().split("\0")
                bound |= {number} if is_bound else set()
    scorers = {number for number, words in commands.items() if any(word.startswith("pipelinerl.rewards") for word in words)}
    orchestrators = {number for number, words in commands.items() if "orchestrator" in words}
    assert len(orchestrators) == 1
    assert len(scorers) >= 2, "the scorer and what starts processes of reward calls"
    assert orchestrators | scorers == bound


def test_cores_that_a_machine_does_not_have_are_named_with_those_that_it_has() -> None:
    here = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match=rf"run.cores names 4095, and processes here may use {', '.join(map(str, sorted(here)))}: name"):
        keep_to((4095,))
    keep_to(())
    assert os.sched_getaffinity(0) == here
