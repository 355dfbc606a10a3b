"""Rewards that compare siblings, in whole simulated runs: every rollout ends once, and every group is compared once."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.config import Config, RewardSection
from tests.sim.chaos import Faults, survive
from tests.sim.peers import World
from tests.sim.run import config, run


def compared(*, steps: int = 6) -> Config:
    """A reward per sample and one per group."""
    rewards = (
        RewardSection(function="unused:reward"),  # pyright: ignore[reportCallIssue]
        RewardSection(function="unused:rank", per="group"),  # pyright: ignore[reportCallIssue]
    )
    return config(trainer={"steps": steps}).model_copy(update={"reward": rewards})


def test_comparisons_reach_the_trainer_with_the_rewards_of_each_sibling(tmp_path: Path) -> None:
    simulated = run(compared(), folder=tmp_path, world=World())
    assert simulated.problems() == []
    means = [line["reward_mean"] for line in simulated.lines if line["kind"] == "step"]
    assert len(means) == 6
    assert all(1.5 <= mean <= 2.5 for mean in means), "0 or 1 of its own, and the places 0 to 3 among four siblings"


@pytest.mark.parametrize("fraction", [0.1, 0.3])
def test_failed_scores_and_failed_comparisons_are_counted_and_every_rollout_ends_once(tmp_path: Path, fraction: float) -> None:
    simulated = run(compared(), folder=tmp_path, world=World(bad_score_fraction=fraction, seed=2))
    assert simulated.problems() == []
    assert simulated.ending.reason == "finished"
    assert simulated.ending.rollouts.failed > 0


def test_figures_of_every_reward_function_stand_in_the_journal(tmp_path: Path) -> None:
    simulated = run(compared(), folder=tmp_path, world=World(step_s=0.2))
    (scorer,) = [line for line in simulated.lines if line["kind"] == "status"][-1]["scorers"]
    assert scorer["functions"]["reward"]["num_failed"] == {"error": 1}
    assert scorer["functions"]["reward"]["p95_s"] == 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults", [Faults(seed=1, scorer_s=0.7), Faults(seed=2, engine_s=5.0, scorer_s=3.0, trainer_s=6.0, orchestrator_s=4.0)]
)
def test_comparisons_survive_whoever_is_killed_and_count_once(tmp_path: Path, faults: Faults) -> None:
    survived = survive(compared(steps=20), folder=tmp_path, faults=faults, world=World(token_s=1e-3, score_s=0.2, bad_score_fraction=0.02))
    assert survived.problems() == []
    assert survived.ending.reason == "finished"
    assert survived.kills["scorer"] >= 2
    trained = [row for row in survived.rows if row[3] == "trained"]
    groups = {row[1]: sorted(float(other[6]) for other in trained if other[1] == row[1]) for row in trained}
    for rewards in groups.values():
        assert all(0.0 <= reward - place <= 1.0 for place, reward in enumerate(rewards)), "its own 0 or 1, and its place among the siblings"
