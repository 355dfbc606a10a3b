"""Advantages over forests of turns, on numbers worked by hand; chains give what was published for chains."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.algorithms.advantage import graph, group_advantages
from pipelinerl.algorithms.advantage.outcome import Float64, ScoredGroup, StepScores
from tests.algorithms.rows import method_of


def turns(scores: list[float], *, parents: list[int] | None = None, anchors: list[int] | None = None) -> StepScores:
    """Turns of one token each."""
    return StepScores(
        ends=np.arange(len(scores)),
        scores=np.array(scores),
        parents=None if parents is None else np.array(parents),
        anchors=None if anchors is None else np.array(anchors),
    )


def forest(*rollouts: StepScores, rewards: list[float]) -> ScoredGroup:
    return ScoredGroup(rewards=np.array(rewards), lengths=np.array([len(one.ends) for one in rollouts]), steps=rollouts)


def credits(group: ScoredGroup, name: str, **options: float | bool) -> list[list[float]]:
    return [np.asarray(row).tolist() for row in group_advantages(group, method=method_of(name, advantage=options))]


BRANCHING, CHAIN = turns([0.0, 1.0, 0.0], parents=[-1, 0, 0]), turns([0.0, 1.0])
"""A first turn with two that continue it, which earned 1 and 0; and two turns in a line, which earned 1."""


def test_tree_grpo_compares_leaves_in_their_tree_and_in_the_forest() -> None:
    """Leaves earned 1, 0 | 1. In their tree: 1/2, -1/2 | 0. Among all, of mean 2/3: 1/3, -2/3 | 1/3. A first turn has its leaves' mean."""
    first, second = credits(forest(BRANCHING, CHAIN, rewards=[1.0, 1.0]), "tree_grpo", divide_by_std=False)
    assert first == pytest.approx([-1 / 6, 5 / 6, -7 / 6])
    assert second == pytest.approx([1 / 3, 1 / 3])


def test_tree_grpo_divides_by_the_spread_of_what_it_compares() -> None:
    first, second = credits(forest(BRANCHING, CHAIN, rewards=[1.0, 1.0]), "tree_grpo")
    own, everywhere = np.std([1.0, 0.0], ddof=1), np.std([1.0, 0.0, 1.0], ddof=1)
    assert first[1:] == pytest.approx([0.5 / own + 1 / 3 / everywhere, -0.5 / own - 2 / 3 / everywhere], abs=1e-5)
    assert second == pytest.approx([1 / 3 / everywhere] * 2, abs=1e-5)


def test_tree_rpo_compares_a_subtree_with_its_siblings() -> None:
    """First turns are worth 1/2 and 1: -1/4 and 1/4. Under the first, 1 against 0: 1/2 and -1/2. A turn alone has its parent's."""
    first, second = credits(forest(BRANCHING, CHAIN, rewards=[1.0, 1.0]), "tree_rpo", divide_by_std=False)
    assert first == [-0.25, 0.5, -0.5]
    assert second == [0.25, 0.25]


def test_tree_rpo_compares_proposals_by_those_who_solved_them() -> None:
    """A group in a group: two proposals, the first solved by 3 of 4, the second by 1 of 2."""
    solved = [turns([0.0, *rewards], parents=[-1] + [0] * len(rewards)) for rewards in ([1.0, 1.0, 1.0, 0.0], [1.0, 0.0])]
    first, second = credits(forest(*solved, rewards=[0.75, 0.5]), "tree_rpo", divide_by_std=False)
    assert first == [0.125, 0.25, 0.25, 0.25, -0.75]
    assert second == [-0.125, 0.5, -0.5]


def test_mt_grpo_adds_the_outcome_to_turns_of_equal_depth() -> None:
    """First turns earned 0.5 and 0, rollouts 1 and 0: both +-1/sqrt(2) once normalised. A last turn has the outcome alone."""
    group = forest(turns([0.5, 9.0]), turns([0.0, 3.0]), rewards=[1.0, 0.0])
    first, second = credits(group, "mt_grpo", outcome_coef=0.5)
    half = np.sqrt(0.5)
    assert first == pytest.approx([1.5 * half, half], abs=1e-5)
    assert second == pytest.approx([-1.5 * half, -half], abs=1e-5)


def test_hgpo_weighs_levels_by_how_far_back_histories_agree() -> None:
    """States 7 8 9, 5 8 9, 7 8; returns at gamma 1/2: 1/4 1/2 1, zeros, 1/2 1.

    By state: 7: -1/8, +1/8; 8 (mean 1/2): 0, -1/2, 1/2; 9: 1/2, -1/2; 5 alone. By state and one before: 7 8 (mean 3/4): -1/4, 1/4; 8 9:
    1/2, -1/2; 5 8 alone. Weights 1 and 2.
    """
    group = forest(
        turns([0.0, 0.0, 1.0], anchors=[7, 8, 9]),
        turns([0.0, 0.0, 0.0], anchors=[5, 8, 9]),
        turns([0.0, 1.0], anchors=[7, 8]),
        rewards=[1.0, 0.0, 1.0],
    )
    first, second, third = credits(group, "hgpo", history=1, gamma=0.5)
    assert first == pytest.approx([-1 / 8, -1 / 6, 1 / 2])
    assert second == pytest.approx([0.0, -1 / 2, -1 / 2])
    assert third == pytest.approx([1 / 8, 1 / 3])


def test_gigpo_and_hgpo_need_states() -> None:
    for name in ("gigpo", "hgpo"):
        with pytest.raises(ValueError, match=f"{name}: StepScores without anchors"):
            credits(forest(CHAIN, CHAIN, rewards=[1.0, 0.0]), name)


def test_gigpo_takes_the_mean_over_branches_for_what_follows() -> None:
    """Returns at gamma 1/2: the first turn of the branching one 1/2 * mean(1, 0), of the chain 1/2. Both answered state 7."""
    branching = turns([0.0, 1.0, 0.0], parents=[-1, 0, 0], anchors=[7, 8, 9])
    group = forest(branching, turns([0.0, 1.0], anchors=[7, 10]), rewards=[1.0, 1.0])
    first, second = credits(group, "gigpo", gamma=0.5, divide_by_std=False)
    assert first == [-0.125, 0.0, 0.0]
    assert second == [0.125, 0.0]


def test_step_scores_of_a_prm_follow_the_branches() -> None:
    scores, parents = np.array([0.5, 0.75, 0.25]), np.array([-1, 0, 0])
    assert graph.differences(scores, parents=parents).tolist() == [0.5, 0.25, -0.25]
    assert graph.future_minimum(scores, parents=parents).tolist() == [0.375, 0.75, 0.25]
    assert graph.following_sum(scores, parents=parents, gamma=0.5).tolist() == [0.75, 0.75, 0.25]
    group = forest(turns([0.5, 0.75, 0.25], parents=[-1, 0, 0]), turns([0.0]), rewards=[0.0, 0.0])
    assert credits(group, "step_difference") == [[0.5, 0.25, -0.25], [0.0]]


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=9), st.floats(0, 1))
def test_a_chain_that_says_its_parents_is_a_chain_that_does_not(scores: list[float], gamma: float) -> None:
    values, parents = np.array(scores), np.arange(len(scores)) - 1
    plain = [sum(gamma ** (j - k) * value for j, value in enumerate(scores) if j >= k) for k in range(len(scores))]
    np.testing.assert_allclose(graph.following_sum(values, gamma=gamma), plain, atol=1e-9)
    np.testing.assert_array_equal(graph.future_minimum(values), [min(scores[k:]) for k in range(len(scores))])
    for rule in (graph.following_sum, graph.future_minimum, graph.differences, graph.path_sum, graph.leaf_mean):
        np.testing.assert_array_equal(rule(values), rule(values, parents=parents))


@given(st.lists(st.integers(-1, 8), min_size=1, max_size=9), st.floats(-1, 1))
def test_equal_leaves_teach_nothing_whatever_the_shape(drawn: list[int], reward: float) -> None:
    parents = [min(parent, k - 1) for k, parent in enumerate(drawn)]
    ends: Float64 = graph.leaves(len(parents), parents=np.array(parents)).astype(np.float64)
    group = forest(turns((reward * ends).tolist(), parents=parents), turns([reward]), rewards=[reward, reward])
    for name in ("tree_grpo", "tree_rpo", "mt_grpo"):
        assert all(
            value == pytest.approx(0.0, abs=1e-9)
            for row in credits(group, name, **({} if name == "mt_grpo" else {"divide_by_std": False}))
            for value in row
        )


def test_parents_must_stand_before_their_turns() -> None:
    for parents in ([-1, 1], [-2, 0], [0, 0]):
        with pytest.raises(ValueError, match="must be earlier steps"):
            turns([0.0, 1.0], parents=parents)
