"""An engine's device becomes a reward model's and back in a live run, with real processes and a real reward model: `reward=N`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.checker.history import open_history
from pipelinerl.checker.invariants import check_history
from pipelinerl.config.file import load
from pipelinerl.demo.settings import demo_config, make_demo_model
from pipelinerl.launch.run_folder import make_run_folder
from pipelinerl.observe.lines import read_journals
from pipelinerl.runtime.membership import ScaleFolder
from scripts.chaos import victims
from tests import processes
from tests.launch.test_scaling import LAUNCHER, PLUGINS, scale
from tests.tiny_models import make_classifier

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(400)]
LOADS_S = 120.0
"""A reward model takes as long to load on two busy cores."""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Path]:
    """A live run with two engines, and one process of a reward model beside a rule."""
    settings = demo_config(folder=tmp_path, seed=0)
    make_demo_model(tmp_path / "demo-model", seed=0)
    make_classifier(tmp_path / "orm", "Qwen2", seed=1, template=False)
    model = f'{{model = "{tmp_path / "orm"}", format = "text", dtype = "float32", deadline_s = 60}}'
    overrides = ["trainer.steps=1000000", "batch.groups_per_step=4", "evaluation.every=0", "evaluation.limit=4", "checkpoint.every=20"]
    overrides += ['engine.kind="fake"', "engine.count=2", "engine.cores=[]", "engine.max_running=16", "run.restart_wait_s=0.1"]
    overrides += [f'data.source="{PLUGINS}:prompts"', f'reward=[{{function = "{PLUGINS}:reward"}}, {model}]']
    folder = make_run_folder(load(settings, overrides=overrides)).absolute()
    with processes.launched(LAUNCHER, folder, within_s=LOADS_S):
        wait_for(folder, "engines 0 live, engines 1 live, reward.1 0 live")
        yield folder


def said(folder: Path) -> str:
    found = ScaleFolder(folder).members()
    there = {} if found is None else found.by_kind()
    return ", ".join(f"{kind} {one.engine_id} {one.state}" for kind, record in there.items() for one in record.members)


def wait_for(folder: Path, what: str) -> None:
    processes.wait_until(lambda: said(folder) == what, what=f"not {what}", within_s=LOADS_S)


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_journals(folder) if line["kind"] == kind]


def num_scored(folder: Path) -> int:
    """Completions that the run has scored."""
    return max((line["queues"]["scored"]["num_items_total"] for line in lines(folder, "status")), default=0)


def are_loaded(folder: Path, *, since_s: float) -> bool:
    """Two processes of the model have loaded it, as a scorer has said since."""
    found = [line["models"]["reward.1"]["processes"] for line in lines(folder, "load") if line.get("models") and line["t"] > since_s]
    return any(len(one) == 2 and all(process["is_loaded"] for process in one.values()) for one in found)


def goes_on(folder: Path) -> None:
    before = num_scored(folder)
    processes.wait_until(lambda: num_scored(folder) >= before + 100, what="nothing is scored", within_s=LOADS_S)


def test_a_live_run_hands_an_engines_device_to_a_reward_model_and_back_also_when_processes_are_killed(live: Path) -> None:
    given = scale(live, "engines=1", "reward=2")
    assert given.returncode == 0, given.stderr
    assert "2 reward.1 processes asked for" in given.stdout
    wait_for(live, "engines 0 live, engines 1 left, reward.1 0 live, reward.1 1 live")
    order = [f"{line['of']} {line['engine_id']} {line['state']}" for line in lines(live, "member")]
    assert order.index("engines 1 left") < order.index("reward.1 1 live")
    goes_on(live)
    (scorer,) = victims.find("scorer", live)
    os.kill(scorer, signal.SIGKILL)
    killed_s = time.time()
    processes.wait_until(lambda: are_loaded(live, since_s=killed_s), what="its processes are not started again", within_s=LOADS_S)
    wait_for(live, "engines 0 live, engines 1 left, reward.1 0 live, reward.1 1 live")
    os.kill(victims.find("orchestrator", live)[0], signal.SIGKILL)
    goes_on(live)
    wait_for(live, "engines 0 live, engines 1 left, reward.1 0 live, reward.1 1 live")
    taken = scale(live, "engines=2", "reward.1=1")
    assert taken.returncode == 0, taken.stderr
    wait_for(live, "engines 0 live, engines 1 live, reward.1 0 live, reward.1 1 left")
    goes_on(live)
    left = [line["reason"] for line in lines(live, "member") if (line["of"], line["state"]) == ("reward.1", "left")]
    assert left == ["it has ended all that it had"]
    refused = scale(live, "reward=0")
    assert refused.returncode != 0
    assert "reward=0: expected 1 to 8" in refused.stdout + refused.stderr
    assert not lines(live, "violation")
    with open_history(live) as history:
        assert check_history(history, with_checkpoints=False).problems == []
