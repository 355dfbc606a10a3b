"""Rewards that compare siblings, in whole simulated runs: every rollout ends once, and every group is compared once."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.config import Config, RewardSection
from tests.sim.peers import World
from tests.sim.run import config, run


def compared() -> Config:
    """A reward per sample and one per group."""
    rewards = (
        RewardSection(function="unused:reward"),  # pyright: ignore[reportCallIssue]
        RewardSection(function="unused:rank", per="group"),  # pyright: ignore[reportCallIssue]
    )
    return config(trainer={"steps": 6}).model_copy(update={"reward": rewards})


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
    assert simulated.ending.identity.failed > 0


def test_figures_of_every_reward_function_stand_in_the_journal(tmp_path: Path) -> None:
    simulated = run(compared(), folder=tmp_path, world=World(step_s=0.2))
    (scorer,) = [line for line in simulated.lines if line["kind"] == "status"][-1]["scorers"]
    assert scorer["functions"]["reward"]["num_failed"] == {"error": 1}
    assert scorer["functions"]["reward"]["p95_s"] == 0.2
