"""Every process may be killed at any instant: nothing is lost or trained twice, and a replay repeats what was; on simulated time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sim.chaos import Faults, Survived, survive
from tests.sim.memory import NetworkFaults
from tests.sim.peers import World
from tests.sim.run import Prompts, config

WORLD = World(token_s=1e-3, bad_score_fraction=0.05)


def check(survived: Survived, *, num_steps: int, groups_per_step: int = 8) -> None:
    assert survived.problems() == []
    assert survived.ending.reason == "finished"
    assert survived.checker.num_done == num_steps
    trained = {row[1] for row in survived.rows if row[3] == "trained"}
    refused = {row[1] for row in survived.rows if row[4].startswith("its row killed the trainer twice")}
    assert len(trained | refused) == num_steps * groups_per_step
    assert not refused or max(survived.disk.deaths.values()) >= 2
    assert survived.disk.version == num_steps


KILLS: dict[str, dict[str, Any]] = {
    "engine": {"engine_s": 3.0},
    "scorer": {"scorer_s": 1.0},
    "trainer": {"trainer_s": 3.0},
    "orchestrator": {"orchestrator_s": 4.0},
    "everything": {"engine_s": 5.0, "scorer_s": 5.0, "trainer_s": 6.0, "orchestrator_s": 10.0},
}


@pytest.mark.slow
@pytest.mark.parametrize(("who", "seed"), [(who, seed) for who in KILLS for seed in range(3 if who == "everything" else 2)])
def test_nothing_is_lost_or_trained_twice_whoever_is_killed(tmp_path: Path, who: str, seed: int):
    faults = Faults(seed=seed, until_s=60.0, **KILLS[who])
    survived = survive(config(trainer={"steps": 30}), folder=tmp_path, faults=faults, world=WORLD)
    check(survived, num_steps=30)
    if who == "orchestrator":
        assert survived.checker.num_reattached > 20, "what engines had outlived it"
        assert not survived.checker.num_retrained, "the trainer, too, and what it holds need not be trained again"
    assert survived.kills[who] >= 2 if who != "everything" else len(survived.kills) == 4, survived.kills


@pytest.mark.slow
def test_kills_over_a_bad_network_break_no_promise(tmp_path: Path):
    network = NetworkFaults(delay_s=0.02, jitter_s=0.1, seed=1)
    faults = Faults(seed=1, until_s=60.0, **KILLS["everything"])
    check(survive(config(trainer={"steps": 30}), folder=tmp_path, faults=faults, world=WORLD, network=network), num_steps=30)


@pytest.mark.parametrize("mode", ["one_step_off", "sync"])
def test_kills_in_rounds_break_no_promise(tmp_path: Path, mode: str):
    faults = Faults(seed=2, until_s=60.0, **KILLS["everything"])
    settings = config(trainer={"steps": 20}, pipeline={"mode": mode})
    check(survive(settings, folder=tmp_path, faults=faults, world=WORLD), num_steps=20)


def test_the_same_kills_give_the_same_ledger(tmp_path: Path):
    def once(name: str) -> list[tuple[object, ...]]:
        folder = tmp_path / name
        folder.mkdir()
        return survive(config(), folder=folder, faults=Faults(seed=5, **KILLS["everything"]), world=WORLD).rows

    assert once("a") == once("b")


def test_steps_since_the_checkpoint_are_trained_again_from_the_same_rows(tmp_path: Path):
    """Checkpoints every 50 steps of 30: none before the last, so every restart goes back to the beginning."""
    faults = Faults(seed=1, until_s=60.0, trainer_s=5.0)
    survived = survive(config(trainer={"steps": 30}), folder=tmp_path, faults=faults, world=WORLD, checkpoint_every=50)
    check(survived, num_steps=30)
    assert survived.checker.num_retrained > 5
    assert set(survived.checker.trainer_starts) == {0}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_trainer_that_finds_its_checkpoint_damaged_goes_on_from_the_one_before(tmp_path: Path, seed: int):
    """The steps in between are undone and trained again from the very same rows, and the checker knows of it."""
    faults = Faults(seed=seed, until_s=40.0, trainer_s=5.0, orchestrator_s=15.0, spoils=True)
    survived = survive(config(trainer={"steps": 30}), folder=tmp_path, faults=faults, world=WORLD)
    check(survived, num_steps=30)
    assert survived.kills["checkpoint"] >= 2
    assert survived.checker.num_discarded >= 2
    assert survived.checker.num_retrained > 5


def test_engines_go_on_generating_while_the_trainer_is_away_up_to_the_bound(tmp_path: Path):
    """K = 4 of 8 groups: what was admitted by the end of a long absence is what the bound allows, and no token is too old afterwards."""
    faults = Faults(seed=4, until_s=8.0, trainer_s=4.0, restart_s=500.0)
    settings = config(trainer={"steps": 12, "silent_after_s": 2000.0}, pipeline={"max_staleness": 4, "stall_limit_s": 2000.0})
    survived = survive(settings, folder=tmp_path, faults=faults, world=WORLD)
    check(survived, num_steps=12)
    assert survived.kills["trainer"] >= 1
    assert survived.seconds > 500
    ages = [row[5] - row[7] for row in survived.rows if row[3] == "trained"]
    assert max(ages) == 4


def first_token(row: int) -> int:
    source = Prompts(0)
    source.position = (0, row)
    return int(source.next().token_ids[0])


def quarantined(survived: Survived) -> list[str]:
    return sorted({row[2].partition(":")[2] for row in survived.rows if row[3] == "failed"})


def test_a_prompt_that_kills_its_engine_twice_is_quarantined_and_no_other_is(tmp_path: Path):
    faults = Faults(killer_tokens=frozenset({first_token(13)}))
    survived = survive(config(), folder=tmp_path, faults=faults, world=World(token_s=1e-3))
    check(survived, num_steps=10)
    assert quarantined(survived) == ["13"]
    assert survived.kills["engine"] == 2


def test_a_quarantine_outlives_the_orchestrator(tmp_path: Path):
    faults = Faults(seed=3, until_s=30.0, orchestrator_s=6.0, killer_tokens=frozenset({first_token(13)}))
    survived = survive(config(), folder=tmp_path, faults=faults, world=World(token_s=4e-3))
    check(survived, num_steps=10)
    assert quarantined(survived) == ["13"]
    assert survived.kills["orchestrator"] >= 2
    assert survived.kills["engine"] <= 3, "twice, and once more where the first death went down with the orchestrator"


@pytest.mark.parametrize("orchestrator_s", [0.0, 6.0])
def test_a_row_that_kills_the_trainer_twice_is_sent_no_more_and_the_step_goes_on(tmp_path: Path, orchestrator_s: float):
    """Its samples fail by name; the others of their groups train, and the checker agrees with ledger and checkpoints."""
    faults = Faults(seed=1, until_s=30.0, orchestrator_s=orchestrator_s, killer_rollouts=frozenset({"13/2"}))
    survived = survive(config(), folder=tmp_path, faults=faults, world=World(token_s=1e-3))
    assert survived.problems() == []
    assert survived.disk.version == 10
    assert survived.kills["trainer"] == 2
    failed = {row[0]: row[4] for row in survived.rows if row[3] == "failed"}
    assert "13/2" in failed
    step, row = next((step, row) for step, rows in survived.disk.seen.items() for row, names in enumerate(rows) if "13/2" in names)
    assert set(failed) == set(survived.disk.seen[step][row])
    assert set(failed.values()) == {f"its row killed the trainer twice: row {row} of step {step}"}
    assert orchestrator_s == 0.0 or survived.kills["orchestrator"] >= 1
