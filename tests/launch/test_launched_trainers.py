"""The launcher changes the trainer as the orchestrator says, with real processes that stand in for all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pipelinerl.config import Config
from pipelinerl.launch import trainer_starts
from pipelinerl.launch.launcher import Launcher
from pipelinerl.launch.roles import Role
from pipelinerl.launch.trainer_starts import TrainerStarts
from pipelinerl.runtime.restarts import Restarts
from tests import processes
from tests.launch.test_trainer_starts import settings

pytestmark = pytest.mark.process

ORCHESTRATOR = """
    import pathlib, time
    from pipelinerl.runtime.membership import ScaleFolder
    from pipelinerl.runtime.trainer_ranks import Phase, TrainerRanks
    folder = pathlib.Path(folder)
    scale, said = ScaleFolder(folder), folder / "said"

    def wait(what):
        while not what():
            time.sleep(0.01)

    def change(ranks, epoch, **more):
        more = {"phase": Phase.STARTING} | more
        scale.publish_trainer(TrainerRanks(ranks=ranks, wanted=ranks, before=1, configured=1, epoch=epoch, **more))

    wait(lambda: said.exists() and said.read_text() == "1 ")
    change(2, 1)
    (folder / "stop-1").touch()
    wait(lambda: said.read_text() == "1 2 ")
    change(2, 1, phase=Phase.SETTLED)
    change(3, 2)
    (folder / "stop-2").touch()
    wait(scale.trainer_failed)
    (folder / "failed").write_text(f"{scale.trainer_failed().epoch} {scale.trainer_failed().reason}")
    (folder / "stop-2").unlink()
    change(2, 3, is_back=True)
    wait(lambda: said.read_text() == "1 2 2 ")
    change(2, 3, phase=Phase.SETTLED)
    (folder / "stop-2").touch()
"""
TRAINER = """
    import pathlib, sys, time
    folder = pathlib.Path(folder)
    if ranks == 3:
        sys.exit("there is no room for three")
    with open(folder / "said", "a") as file:
        file.write(f"{ranks} ")
    while not (folder / f"stop-{ranks}").exists():
        time.sleep(0.01)
    sys.exit("it ends badly, and is to be followed" if ranks == 1 else 0)
"""


KILLS = """
    import os, pathlib, signal, time
    from pipelinerl.runtime.membership import ScaleFolder
    from pipelinerl.runtime.trainer_ranks import Phase, TrainerRanks
    folder = pathlib.Path(folder)
    scale, said, log = ScaleFolder(folder), folder / "said", folder / "logs" / "launcher.log"

    def wait(what):
        while not what():
            time.sleep(0.01)

    wait(lambda: said.exists() and said.read_text().endswith(" "))
    os.kill(int(said.read_text()), signal.SIGKILL)
    wait(lambda: log.exists() and "starting it again in" in log.read_text())
    change = {"ranks": 2, "wanted": 2, "before": 1, "configured": 1, "epoch": 1}
    scale.publish_trainer(TrainerRanks(phase=Phase.STARTING, **change))
    wait(lambda: len(said.read_text().split()) == 2)
    scale.publish_trainer(TrainerRanks(phase=Phase.SETTLED, **change))
    time.sleep(3.0)  # longer than the first one would have waited to start again
    (folder / "stop").touch()
"""
KILLED = """
    import os, pathlib, time
    folder = pathlib.Path(folder)
    with open(folder / "said", "a") as file:
        file.write(f"{os.getpid()} ")
    while not (folder / "stop").exists():
        time.sleep(0.01)
"""


def test_a_trainer_that_is_killed_as_another_takes_its_place_is_not_started_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Role(name="trainer", command=processes.program(KILLED, folder=tmp_path))
    monkeypatch.setattr(trainer_starts, "trainer_of", lambda config, run_folder: trainer)
    orchestrator = Role(name="orchestrator", command=processes.program(KILLS, folder=tmp_path))
    restarts, starts = Restarts(budget=2, first_wait_s=2.5), TrainerStarts(settings(), tmp_path)
    asyncio.run(Launcher((orchestrator, trainer), tmp_path, trainers=starts, restarts=restarts).run())
    assert len((tmp_path / "said").read_text().split()) == 2


def test_a_trainer_of_other_ranks_is_started_once_the_one_before_has_ended_and_one_that_fails_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trainer(ranks: int) -> Role:
        return Role(name="trainer", command=processes.program(TRAINER, folder=tmp_path, ranks=ranks))

    def made(config: Config, run_folder: Path) -> Role:
        return trainer(config.trainer.ranks)

    monkeypatch.setattr(trainer_starts, "trainer_of", made)
    orchestrator = Role(name="orchestrator", command=processes.program(ORCHESTRATOR, folder=tmp_path))
    config = settings()
    launcher = Launcher((orchestrator, trainer(1)), tmp_path, trainers=TrainerStarts(config, tmp_path))
    asyncio.run(launcher.run())
    assert (tmp_path / "said").read_text() == "1 2 2 ", "one for each change, and the layout before once more"
    epoch, _, reason = (tmp_path / "failed").read_text().partition(" ")
    assert epoch == "2"
    assert "there is no room for three" in reason
