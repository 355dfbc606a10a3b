"""Episodes that branch in whole simulated runs: every sampled token trains once, after its own path, whoever is killed meanwhile."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from orchestrator.advantages import MethodAdvantages
from orchestrator.rollouts.multi_turn import Episode
from orchestrator.rules.batch import Siblings
from pipelinerl.algorithms.methods import method_of
from pipelinerl.data.episode_graph import Node
from pipelinerl.messages import MicroBatch, Result
from tests.sim import peers
from tests.sim.chaos import Faults, survive
from tests.sim.peers import World
from tests.sim.run import run
from tests.sim.test_episodes import episodes

WORLD = World(token_s=1e-3, mean_tokens=8)
OBSERVE = Episode.observe


@pytest.fixture(autouse=True)
def _branching_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply says where the next turn goes on: after it, beside the turn (from the prompt), or in a context of its own."""

    def observe(episode: Episode, result: Result) -> Episode:
        after = OBSERVE(episode, result)
        if after.is_over or result.observation is None:
            return after
        parent = {0: episode.at, 1: 0, 2: -1}[int(result.observation.token_ids[0]) % 3]
        node = Node.given(result.observation.token_ids, parent=parent)
        return dataclasses.replace(after, graph=episode.graph.append(node))

    monkeypatch.setattr(Episode, "observe", observe)


@pytest.mark.parametrize("method", ["gigpo", "tree_grpo"])
def test_every_sampled_token_trains_once_after_its_own_path(tmp_path: Path, method: str) -> None:
    settings = episodes(algorithm={"name": method})
    rule = MethodAdvantages(method_of(settings), settings.reward)
    simulated = run(settings, folder=tmp_path, world=WORLD, group_advantages=rule)
    assert simulated.problems() == []
    assert len(simulated.record.branching) > 20
    assert set(simulated.record.turns.values()) == {1, 2, 3, 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [Faults(seed=7, engine_s=1.0), Faults(seed=4, engine_s=5.0, scorer_s=5.0, trainer_s=6.0, orchestrator_s=7.0)],
    ids=["engine", "all"],
)
def test_they_survive_whoever_is_killed(tmp_path: Path, faults: Faults) -> None:
    settings = episodes(algorithm={"name": "tree_rpo"}, trainer={"steps": 16})
    rule = MethodAdvantages(method_of(settings), settings.reward)
    world = World(token_s=1e-3, mean_tokens=8, bad_reply_fraction=0.02, bad_score_fraction=0.02)
    survived = survive(settings, folder=tmp_path, faults=faults, world=world, group_advantages=rule)
    assert survived.problems() == []
    assert survived.ending.reason == "finished"
    assert sum(survived.kills.values()) >= 2


def test_a_turn_that_stood_in_two_rows_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer is given each sample of a branching rollout with its last turn once more."""
    note = peers.note

    def twice(batch: MicroBatch, record: peers.TrainerRecord) -> None:
        note(batch, record)
        for rollout_id in record.branching:
            record.num_tokens[rollout_id] += 1

    monkeypatch.setattr(peers, "note", twice)
    rule = MethodAdvantages(method_of(settings := episodes(algorithm={"name": "gigpo"}, trainer={"steps": 1})), settings.reward)
    simulated = run(settings, folder=tmp_path, world=WORLD, group_advantages=rule)
    assert any("the ledger says (step, oldest version, tokens)" in problem for problem in simulated.problems())


def test_shown_to_a_reward_is_the_line_to_the_last_turn(tmp_path: Path) -> None:
    shown: list[tuple[int, int]] = []

    def credit(siblings: Siblings):
        from orchestrator.rollouts.trajectories import last_line

        for member in siblings:
            token_ids, turns = last_line(member.trajectory)
            assert turns is not None
            assert int(turns.ends[-1]) == len(token_ids) - 1
            shown.append((len(turns.starts), len(member.trajectory.turns.starts) if member.trajectory.turns else 0))
        return [np.where(member.trajectory.loss_mask, 1.0, 0.0).astype(np.float32) for member in siblings]

    simulated = run(episodes(trainer={"steps": 2}), folder=tmp_path, world=WORLD, group_advantages=credit)
    assert simulated.problems() == []
    assert any(line < whole for line, whole in shown)
