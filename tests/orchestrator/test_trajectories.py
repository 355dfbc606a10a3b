"""Trajectories of episodes that branch, worked by hand: what stands where, what are turns, what trains, what a reward is shown."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from orchestrator.advantages import MethodAdvantages
from orchestrator.ledger.rollouts import summary_of
from orchestrator.rollouts.micro_batch import micro_batch_of
from orchestrator.rollouts.scorer_tasks import reward_task
from orchestrator.rollouts.trajectories import last_line, trajectory_of
from orchestrator.rules.batch import Filtered
from orchestrator.rules.kv import squared_lags_of
from pipelinerl.algorithms.method import Need
from pipelinerl.algorithms.methods import resolve
from pipelinerl.config import RewardSection
from pipelinerl.data.episode_graph import EpisodeGraph, Node
from pipelinerl.errors import WireError
from pipelinerl.messages import Completion, Finish, Outcome, Sample, Score, ScoredTrajectory, Trajectory
from pipelinerl.transport.codec import Decoder, encode
from tests.orchestrator import handmade

PROMPT = handmade.prompt(2)
FACTS = {"group_id": 0, "attempt": 0, "finish": Finish.STOP}


def turn(*token_ids: int, parent: int, versions: list[int], state: str = "") -> Node:
    said = Completion(
        rollout_id="0/0",
        attempt=0,
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.full(len(token_ids), -0.5, np.float32),
        versions=np.array(versions, np.int32),
        finish=Finish.STOP,
    )
    return Node.sampled_by(said, parent=parent, state=state)


def given(*token_ids: int, parent: int = -1) -> Node:
    return Node.given(np.array(token_ids, np.int32), parent=parent)


def branching(*, sibling: int = 0) -> Trajectory:
    """Prompt - turn 10 11 - 50 - turn 20
                            \\ 51 - turn 30 31
    and 52, which no turn follows, and a fresh context 60 - turn 40.
    """
    graph = EpisodeGraph()
    for node in (
        given(*PROMPT.token_ids.tolist()),
        turn(10, 11, parent=0, versions=[3, 3], state="start"),
        given(50, parent=1),
        turn(20, parent=2, versions=[4], state="X"),
        given(52, parent=3),
        given(51, parent=1),
        turn(30, 31, parent=5, versions=[3, 5], state="X"),
        given(60),
        turn(40, parent=7, versions=[2], state="fresh"),
    ):
        graph = graph.append(node)
    return trajectory_of(PROMPT, graph, rollout_id=f"0/{sibling}", sibling=sibling, recomputed=[(6, 1)], **FACTS)


def test_nodes_stand_end_to_end_each_once_without_what_no_turn_follows() -> None:
    row = branching()
    assert row.nodes is not None
    assert row.token_ids.tolist() == [100, 101, 10, 11, 50, 20, 51, 30, 31, 60, 40]
    assert row.versions.tolist() == [-1, -1, 3, 3, -1, 4, -1, 3, 5, -1, 2]
    assert row.nodes.parents.tolist() == [-1, 0, 1, 2, 1, 4, -1, 6]
    assert row.nodes.lengths.tolist() == [2, 2, 1, 1, 1, 2, 1, 1]
    assert row.turns is not None
    assert row.turns.parents is not None
    assert (row.turns.starts.tolist(), row.turns.ends.tolist()) == ([0, 3, 5, 8], [1, 3, 6, 8])
    assert (row.turns.parents.tolist(), row.turns.states) == ([-1, 0, 0, -1], ("start", "X", "X", "fresh"))
    assert row.turns.rewards is None
    assert row.recomputed == (6,)
    assert (row.num_trained_tokens, int(row.versions[row.loss_mask].min())) == (6, 2)
    assert (summary_of(row).oldest_version, summary_of(row).newest_version, summary_of(row).num_tokens) == (2, 5, 6)


def test_it_travels_and_one_whose_versions_fall_along_a_path_does_not() -> None:
    row = branching()
    decoder: Decoder[Trajectory] = Decoder(Trajectory)
    assert encode(decoder.decode(encode(row))) == encode(row)
    versions = row.versions.copy()
    versions[5] = 2
    broken = encode(row).replace(row.versions.tobytes(), versions.tobytes())
    with pytest.raises(WireError, match=r"node 3 has versions \[2\] after 3, expected a node that is sampled whole"):
        decoder.decode(broken)
    columns = {name: getattr(row, name)[:-1] for name in ("token_ids", "loss_mask", "logprobs", "versions")}
    with pytest.raises(ValueError, match=r"nodes of \[2, 2, 1, 1, 1, 2, 1, 1\] tokens, expected 10"):
        msgspec.structs.replace(row, **columns)


def test_an_episode_of_another_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="begins with other tokens than the prompt's"):
        trajectory_of(PROMPT, EpisodeGraph().append(given(1, 2)), rollout_id="0/0", sibling=0, **FACTS)


def test_what_turns_earned_goes_with_them() -> None:
    graph = EpisodeGraph().append(given(100, 101)).append(turn(10, parent=0, versions=[0])).append(given(50, parent=1))
    graph = graph.append(turn(20, parent=2, versions=[0])).with_reward(3, 0.25)
    row = trajectory_of(PROMPT, graph, rollout_id="0/0", sibling=0, **FACTS)
    assert row.nodes is None, "a line is one sequence"
    assert row.turns is not None
    assert (row.turns.parents, None if row.turns.rewards is None else row.turns.rewards.tolist()) == (None, [0.0, 0.25])


def test_a_reward_is_shown_the_line_to_the_last_turn() -> None:
    token_ids, turns = last_line(branching())
    assert turns is not None
    assert (token_ids.tolist(), turns.starts.tolist(), turns.states) == ([60, 40], [1], ("fresh",)), "a context of its own"
    graph = EpisodeGraph().append(given(100, 101)).append(turn(10, parent=0, versions=[0], state="a"))
    graph = graph.append(given(50, parent=1)).append(turn(20, parent=2, versions=[0], state="b"))
    graph = graph.append(given(51, parent=1)).append(turn(30, parent=4, versions=[1], state="c"))
    row = trajectory_of(PROMPT, graph, rollout_id="0/0", sibling=0, **FACTS)
    (task,) = (reward_task(row),)
    assert task.completions[0].tolist() == [10, 51, 30]
    assert task.turns[0] is not None
    assert (task.turns[0].starts.tolist(), task.turns[0].states, task.turns[0].parents) == ([0, 2], ("a", "c"), None)


def test_a_row_holds_the_nodes_of_all_its_samples() -> None:
    plain = handmade.trajectory([0, 0, 0], num_prompt=2)
    rows = [plain, branching(), branching(sibling=1)]
    samples = tuple(Sample(trajectory=row, reward=0.0, advantages=np.zeros(row.num_tokens, np.float32)) for row in rows)
    batch = micro_batch_of(samples, step=5, index=0)
    assert batch.nodes is not None
    own = [-1, 0, 1, 2, 1, 4, -1, 6]
    assert batch.nodes.parents.tolist() == [
        -1,
        *(-1 if parent < 0 else 1 + parent for parent in own),
        *(-1 if parent < 0 else 9 + parent for parent in own),
    ]
    assert batch.nodes.lengths.tolist() == [plain.num_tokens, *[2, 2, 1, 1, 1, 2, 1, 1] * 2]
    assert micro_batch_of(samples[:1], step=5, index=0).nodes is None


def scored(row: Trajectory, reward: float) -> ScoredTrajectory:
    return ScoredTrajectory(trajectory=row, score=Score(rollout_id=row.rollout_id, attempt=0, outcome=Outcome.OK, reward=reward))


def test_tree_rpo_over_turns_that_branch() -> None:
    """Leaves earn the outcome, 1 and 0. First turns, two in each rollout, are worth 1 1 | 0 0; what continues them has nothing to add."""
    method = resolve("tree_rpo", {"advantage": {"divide_by_std": False}}, group_size=2, offers={Need.TURNS})
    credit = MethodAdvantages(method, (RewardSection.model_validate({"function": "rewards.py:right", "weight": 1.0}),))
    columns = credit((scored(branching(), 1.0), scored(branching(sibling=1), 0.0)))
    assert not isinstance(columns, Filtered)
    assert columns[0].tolist() == [0, 0, 0.5, 0.5, 0, 0, 0, 0, 0, 0, 0.5]
    assert columns[1].tolist() == [0, 0, -0.5, -0.5, 0, 0, 0, 0, 0, 0, -0.5]


def test_turns_have_what_they_earned_and_the_last_the_rest_of_the_reward() -> None:
    """The first sibling's first turn earned 1/2, and its rollout 1; the other's nothing. Returns at gamma 1/2: 3/4 1/2 and 0 0."""
    graph = EpisodeGraph().append(given(100, 101)).append(turn(10, parent=0, versions=[0], state="a")).append(given(50, parent=1))
    graph = graph.append(turn(20, parent=2, versions=[0], state="b"))
    rows = [
        trajectory_of(PROMPT, one, rollout_id=f"0/{sibling}", sibling=sibling, **FACTS)
        for sibling, one in enumerate((graph.with_reward(1, 0.5), graph))
    ]
    method = resolve("gigpo", {"advantage": {"gamma": 0.5, "divide_by_std": False}}, group_size=2, offers={Need.ANCHORS})
    credit = MethodAdvantages(method, (RewardSection.model_validate({"function": "rewards.py:right", "weight": 1.0}),))
    columns = credit((scored(rows[0], 1.0), scored(rows[1], 0.0)))
    assert not isinstance(columns, Filtered)
    assert columns[0].tolist() == [0, 0, 0.5 + 0.375, 0, 0.5 + 0.25]
    assert columns[1].tolist() == [0, 0, -0.5 - 0.375, 0, -0.5 - 0.25]


def test_the_cache_of_a_turn_is_that_of_its_path() -> None:
    """Beside another turn stand 50, given, and 20 21 22 of versions 3 4 5: before 22 lie 3 tokens two versions behind, then 20 and 21."""
    graph = EpisodeGraph().append(given(100, 101)).append(turn(10, parent=0, versions=[3])).append(given(50, parent=0))
    graph = graph.append(turn(20, 21, 22, parent=2, versions=[3, 4, 5]))
    row = trajectory_of(PROMPT, graph, rollout_id="0/0", sibling=0, **FACTS)
    square, count = squared_lags_of(row, trained=5)
    assert (square, count) == (pytest.approx(((3 * 2 + 2 + 1) / 5) ** 2), 1)
    row = trajectory_of(PROMPT, graph, rollout_id="0/0", sibling=0, recomputed=[(3, 2)], **FACTS)
    assert squared_lags_of(row, trained=5) == (0.0, 0), "it was computed anew before it"
