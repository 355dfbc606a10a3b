"""Every process may be killed at any instant: nothing is lost or trained twice, and a replay repeats what was; on simulated time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.chaos import Faults, Survived, survive
from tests.sim.peers import World
from tests.sim.run import config

WORLD = World(token_s=1e-3, bad_score_fraction=0.05)


def check(survived: Survived, *, num_steps: int, groups_per_step: int = 8) -> None:
    assert survived.problems() == []
    assert survived.ending.reason == "finished"
    assert survived.trial.num_done == num_steps
    trained = [row for row in survived.rows if row[3] == "trained"]
    assert len({row[1] for row in trained}) == num_steps * groups_per_step
    assert survived.disk.version == num_steps


KILLS = {
    "engine": {"engine_s": 3.0},
    "scorer": {"scorer_s": 1.0},
    "trainer": {"trainer_s": 3.0},
    "orchestrator": {"orchestrator_s": 4.0},
    "everything": {"engine_s": 5.0, "scorer_s": 5.0, "trainer_s": 6.0, "orchestrator_s": 10.0},
}


@pytest.mark.parametrize("who", KILLS)
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_or_trained_twice_whoever_is_killed(tmp_path: Path, who: str, seed: int):
    faults = Faults(seed=seed, until_s=60.0, **KILLS[who])
    survived = survive(config(trainer={"steps": 30}), folder=tmp_path, faults=faults, world=WORLD)
    check(survived, num_steps=30)
    assert survived.kills[who] >= 2 if who != "everything" else len(survived.kills) == 4, survived.kills
