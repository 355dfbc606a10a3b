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
