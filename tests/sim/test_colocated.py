"""Engines and trainer take turns on one device: nobody reads weights while they change, whoever is killed; on simulated time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sim.chaos import Faults, survive
from tests.sim.peers import Device, World
from tests.sim.run import Prompts, config, run
from tests.sim.test_recovery import check

WORLD = World(token_s=1e-3, bad_score_fraction=0.05)


def colocated(**sections: dict[str, Any]):
    return config(**{**sections, "pipeline": {"placement": "colocated", **sections.get("pipeline", {})}})


def test_rollouts_are_carried_over_training_phases_and_none_is_aborted(tmp_path: Path):
    device = Device()
    ended = run(colocated(), folder=tmp_path, world=World(mean_tokens=48, device=device))
    assert ended.problems() == []
    assert device.problems == []
    assert device.num_passes > 50
    phases = [line for line in ended.lines if line["kind"] == "phase"]
    assert [line["phase"] for line in phases] == ["training", "generation"] * (len(phases) // 2)
    assert len(phases) // 2 == 11, "one before the trainer has published what it loaded, and one for each step"
    naps = [line for line in ended.lines if line["kind"] == "asleep"]
    assert sum(line["num_running"] for line in naps) > 20
    trained = [row for row in ended.rows if row[3] == "trained"]
    assert any(row[7] < row[8] for row in trained), "tokens of two policies in one rollout"
    assert not [row for row in ended.rows if row[3] in ("cancelled", "failed") and row[4] != "the run ended"]


def test_taking_turns_in_rounds_trains_what_the_newest_policy_sampled(tmp_path: Path):
    ended = run(colocated(pipeline={"mode": "sync"}), folder=tmp_path, world=World(device=(device := Device())))
    assert ended.problems() == []
    assert device.problems == []
    assert all(row[5] == row[7] for row in ended.rows if row[3] == "trained")


def test_an_evaluation_keeps_its_policy_through_phases(tmp_path: Path):
    held_out = tuple(Prompts(9).next() for _ in range(4))
    settings = colocated(evaluation={"source": "unused", "every": 2})
    ended = run(settings, folder=tmp_path, world=World(device=(device := Device())), held_out=held_out)
    assert ended.problems() == []
    assert device.problems == []
    told = [line for line in ended.lines if line["kind"] == "evaluation"]
    assert {line["version"] for line in told} >= {0, 10}
    assert len(told) >= 4
    assert all(line["oldest_version"] == line["newest_version"] == line["version"] for line in told)


def test_a_run_that_is_stopped_while_it_trains_ends_with_its_last_policy_in_force(tmp_path: Path):
    """Half of the time is the trainer's here."""
    for stop_at_s in (6.0, 6.5, 7.0):
        folder = tmp_path / str(stop_at_s)
        folder.mkdir()
        held_out = (Prompts(9).next(),)
        settings = colocated(evaluation={"source": "unused"}, trainer={"steps": 100})
        ended = run(settings, folder=folder, world=World(token_s=1e-3, device=Device()), held_out=held_out, stop_at_s=stop_at_s)
        assert ended.record.last_version
        assert ended.ending.evaluations[-1][0] == ended.record.last_version


KILLS: dict[str, dict[str, Any]] = {
    "engine": {"engine_s": 3.0},
    "trainer": {"trainer_s": 3.0},
    "orchestrator": {"orchestrator_s": 4.0},
    "everything": {"engine_s": 5.0, "scorer_s": 5.0, "trainer_s": 6.0, "orchestrator_s": 10.0},
}


@pytest.mark.parametrize("who", KILLS)
def test_nothing_is_lost_or_read_while_it_changes_whoever_is_killed_in_whichever_phase(tmp_path: Path, who: str):
    faults = Faults(seed=1, until_s=60.0, **KILLS[who])
    survived = survive(colocated(trainer={"steps": 20}), folder=tmp_path, faults=faults, world=WORLD)
    check(survived, num_steps=20)
    assert survived.kills
