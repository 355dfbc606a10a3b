"""A live run's trainer gets a rank for an engine and gives it back: real engines, real ranks, and kills on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelinerl.config.file import load
from pipelinerl.demo.settings import demo_config, make_demo_model
from pipelinerl.launch.run_folder import make_run_folder
from pipelinerl.observe.lines import read_journals
from pipelinerl.runtime.membership import ScaleFolder, State
from pipelinerl.runtime.trainer_ranks import Phase, TrainerRanks
from scripts.chaos import victims
from tests import processes

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(500)]
LOAD_S = 150.0
"""Longest wait for something to load, on a machine that may be busy with something else."""
LAUNCHER = """
    import asyncio, sys
    from pathlib import Path
    from pipelinerl.config.file import load_run
    from pipelinerl.launch import trainer_starts
    from pipelinerl.launch.run_launcher import launcher_of
    from pipelinerl.launch.roles import TRAINER, Role, roles_of
    from pipelinerl.runtime.lease import held
    folder = Path(folder)
    config = load_run(folder)
    real = trainer_starts.trainer_of
    ends = (sys.executable, "-c", "import sys; sys.exit('there is no room for three')")
    trainer_starts.trainer_of = lambda config, run_folder: (
        Role(name=TRAINER, command=ends) if config.trainer.ranks == 3 else real(config, run_folder)
    )
    with held(folder) as lease:
        asyncio.run(launcher_of(config, roles_of(config, folder), folder, lease=lease).run())
"""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Path]:
    """A live run with two engines and one rank of the trainer, whose ranks share one copy however many they are."""
    settings = demo_config(folder=tmp_path, seed=0)
    make_demo_model(tmp_path / "demo-model", seed=0)
    overrides = ["trainer.steps=1000000", "batch.groups_per_step=8", "evaluation.every=0", "evaluation.limit=4", "checkpoint.every=1000"]
    overrides += [
        "engine.count=2",
        "engine.cores=[]",
        "trainer.cores=[]",
        "engine.max_running=32",
        "engine.kv_cache_bytes=67108864",
    ]
    overrides += ['trainer.parallel.shard="all"']
    folder = make_run_folder(load(settings, overrides=[*overrides, "run.restart_wait_s=0.1"])).absolute()
    with processes.launched(LAUNCHER, folder, within_s=LOAD_S):
        wait_until(lambda: steps(folder) >= 3, what="the run trains nothing")
        yield folder


def wait_until(claim: Callable[[], bool], *, what: str) -> None:
    processes.wait_until(claim, what=what, within_s=LOAD_S)


def steps(folder: Path) -> int:
    return sum(line["kind"] == "step" for line in read_journals(folder))


def scale(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "pipelinerl", "scale", str(folder), *words)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LOAD_S)


def state_of(folder: Path, engine_id: int) -> State | None:
    found = ScaleFolder(folder).members()
    return next((one.state for one in found.members if one.engine_id == engine_id), None) if found is not None else None


def settled(folder: Path, *, after: int) -> TrainerRanks:
    """Wait until the change of this epoch, or one after it, is over, and a few steps are trained since."""

    def is_over() -> bool:
        found = ScaleFolder(folder).trainer()
        return found is not None and found.epoch >= after and found.phase is Phase.SETTLED

    wait_until(is_over, what=f"the trainer does not change: {ScaleFolder(folder).trainer()}")
    trains_on(folder)
    found = ScaleFolder(folder).trainer()
    assert found is not None
    return found


def trains_on(folder: Path) -> None:
    before = steps(folder)
    wait_until(lambda: steps(folder) >= before + 3, what="the run stands still")


def kill(folder: Path, peer: str) -> None:
    os.kill(int((folder / "processes" / peer).read_text().rpartition(" ")[2]), signal.SIGKILL)


def is_starting(folder: Path) -> bool:
    found = ScaleFolder(folder).trainer()
    return found is not None and found.phase is Phase.STARTING


def check(folder: Path) -> str:
    return subprocess.run([sys.executable, "-m", "pipelinerl.checker", str(folder)], capture_output=True, text=True, check=False).stdout


def test_an_engines_device_becomes_a_trainer_rank_and_back_and_what_does_not_start_falls_back(live: Path) -> None:
    grown = scale(live, "engines=1", "trainer=2")
    assert grown.returncode == 0, grown.stderr
    assert settled(live, after=1).ranks == 2
    assert state_of(live, 1) is State.LEFT
    versions = [line["version"] for line in read_journals(live) if line["kind"] == "trainer"]
    done = [line["step"] for line in read_journals(live) if line["kind"] == "step"]
    assert versions[0] == 0
    assert done == sorted(set(done)), "no step is trained again"
    kill(live, "trainer-1")
    wait_until(lambda: len([1 for line in read_journals(live) if line["kind"] == "trainer"]) == 3, what="nobody starts it again")
    trains_on(live)
    failed = scale(live, "trainer=3")
    assert failed.returncode == 0, failed.stderr
    back = settled(live, after=3)
    assert (back.ranks, back.is_back) == (2, True)
    assert "there is no room for three" in back.reason
    shrunk = scale(live, "engines=2", "trainer=1")
    assert shrunk.returncode == 0, shrunk.stderr
    wait_until(lambda: is_starting(live), what="the trainer does not save")
    (orchestrator,) = victims.find("orchestrator", live)
    os.kill(orchestrator, signal.SIGKILL)  # who follows awaits the trainer as well
    assert settled(live, after=4).ranks == 1
    wait_until(lambda: state_of(live, 1) is State.LIVE, what="the engine does not come back")
    assert "the trainer has 1 rank" in scale(live).stdout
    refused = scale(live, "trainer=9")
    assert refused.returncode == 1
    assert "expected 1 to 8" in refused.stderr
    assert "every promise was kept" in check(live)
