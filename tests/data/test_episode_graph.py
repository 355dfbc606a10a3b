"""Episodes as graphs, on shapes drawn by hand: a chain, parallel calls, a compaction, a sub-agent; and on random ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.data import episode_graph
from pipelinerl.data.episode_graph import EpisodeGraph, Node
from pipelinerl.errors import EpisodeError, EpisodeFull, WireError
from pipelinerl.messages import UNSAMPLED, Completion, Finish
from pipelinerl.transport.codec import Decoder, encode


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def sampled(*tokens: int, parent: int, versions: list[int] | None = None, state: str = "") -> Node:
    completion = Completion(
        rollout_id="0/0",
        attempt=0,
        token_ids=ids(*tokens),
        logprobs=np.full(len(tokens), -0.5, np.float32),
        versions=np.array(versions or [0] * len(tokens), np.int32),
        finish=Finish.STOP,
    )
    return Node.sampled_by(completion, parent=parent, state=state)


def graph(*nodes: Node) -> EpisodeGraph:
    made = EpisodeGraph()
    for node in nodes:
        made = made.append(node)
    return made


def branching() -> EpisodeGraph:
    """Prompt 1 2, turn 3, then two calls at once (4 -> 6 7 and 5 -> 8), and a fresh context 1 9 -> 10.

    0 [1 2] - 1 [3] - 2 [4] - 3 [6 7]
                    \\ 4 [5] - 5 [8]
    6 [1 9] - 7 [10]
    """
    return graph(
        Node.given(ids(1, 2)),
        sampled(3, parent=0, versions=[1], state="start"),
        Node.given(ids(4), parent=1),
        sampled(6, 7, parent=2, versions=[1, 2]),
        Node.given(ids(5), parent=1),
        sampled(8, parent=4, versions=[1]),
        Node.given(ids(1, 9)),
        sampled(10, parent=6, versions=[0]),
    )


def test_a_context_is_everything_from_the_root() -> None:
    made = branching()
    assert made.path(5) == (0, 1, 4, 5)
    assert made.context(5).tolist() == [1, 2, 3, 5, 8]
    assert made.context(7).tolist() == [1, 9, 10]
    assert made.leaves == (3, 5, 7)
    assert made.num_tokens == 11


def test_rows_are_paths_and_a_shared_turn_trains_in_the_first() -> None:
    first, second, third = branching().rows()
    assert (first.path, first.trained) == ((0, 1, 2, 3), (1, 3))
    assert first.token_ids.tolist() == [1, 2, 3, 4, 6, 7]
    assert first.loss_mask.tolist() == [False, False, True, False, True, True]
    assert first.versions.tolist() == [-1, -1, 1, -1, 1, 2]
    assert first.logprobs.tolist() == [0.0, 0.0, -0.5, 0.0, -0.5, -0.5]
    assert (second.path, second.trained) == ((0, 1, 4, 5), (5,))
    assert second.loss_mask.tolist() == [False, False, False, False, True]
    assert second.versions.tolist() == [-1, -1, -1, -1, 1], "the shared turn has no loss here, so no version either"
    assert (third.path, third.trained) == ((6, 7), (7,))


def test_what_was_given_after_the_last_turn_is_in_no_row() -> None:
    made = graph(Node.given(ids(1)), sampled(2, parent=0), Node.given(ids(3), parent=1), Node.given(ids(4)))
    assert [row.path for row in made.rows()] == [(0, 1)]
    assert EpisodeGraph().rows() == ()


@given(st.lists(st.tuples(st.integers(-1, 30), st.booleans(), st.integers(1, 3)), max_size=24))
def test_every_sampled_token_is_in_the_loss_of_exactly_one_row(shape: list[tuple[int, bool, int]]) -> None:
    made = EpisodeGraph()
    for index, (parent, is_sampled, num) in enumerate(shape):
        parent = min(parent, index - 1)
        tokens = tuple(range(100 * index, 100 * index + num))
        made = made.append(sampled(*tokens, parent=parent) if is_sampled else Node.given(ids(*tokens), parent=parent))
    trained = np.concatenate([row.token_ids[row.loss_mask] for row in made.rows()] or [ids()])
    expected = [token for node in made.nodes if node.is_sampled for token in node.token_ids.tolist()]
    assert sorted(trained.tolist()) == sorted(expected)
    assert len({row.path for row in made.rows()}) == len(made.rows())


def test_versions_may_not_fall_along_a_path_but_may_between_branches() -> None:
    made = branching()
    assert [made.newest_version(index) for index in (0, 2, 3, 5, 6)] == [UNSAMPLED, 1, 2, 1, UNSAMPLED]
    assert made.append(sampled(11, parent=4, versions=[1])).num_tokens == 12
    with pytest.raises(EpisodeError, match="node 8 begins under version 0, but its path was sampled under version 1 already"):
        made.append(sampled(11, parent=4, versions=[0]))
    with pytest.raises(EpisodeError, match=r"versions fall along a node: \[2, 1\]"):
        Node(parent=0, token_ids=ids(1, 2), logprobs=np.zeros(2, np.float32), versions=ids(2, 1))


@pytest.mark.parametrize(
    ("versions", "logprobs", "reward", "said"),
    [
        ([], [], None, "a node has no tokens"),
        ([-1, 0], [0.0, 0.0], None, "1 sampled tokens of 2, expected all or none"),
        ([-2, -2], [0.0, 0.0], None, "a token of version -2"),
        ([-1, -1], [0.0, -1.0], None, "a given node has a reward or log-probabilities"),
        ([-1, -1], [0.0, 0.0], 1.0, "a given node has a reward or log-probabilities"),
        ([0, 0], [0.0, 0.0], float("nan"), "the reward of a node is nan"),
        ([0], [0.0, 0.0], None, "columns differ in length"),
    ],
)
def test_a_node_that_is_neither_given_nor_sampled_is_refused(
    versions: list[int], logprobs: list[float], reward: float | None, said: str
) -> None:
    columns = {"token_ids": ids(*versions), "logprobs": np.array(logprobs, np.float32), "versions": ids(*versions)}
    with pytest.raises(ValueError, match=said):
        Node(parent=-1, reward=reward, **columns)


def test_a_parent_must_stand_before_its_child() -> None:
    for parent in (1, -2):
        with pytest.raises(EpisodeError, match=f"node 1 continues node {parent}, expected an earlier one"):
            graph(Node.given(ids(1)), Node.given(ids(2), parent=parent))
    with pytest.raises(EpisodeError, match="node 3 is asked for, expected one of the 1"):
        graph(Node.given(ids(1))).context(3)


def test_a_reward_is_said_after_the_turn_and_of_a_turn_only() -> None:
    made = branching().with_reward(3, 0.5).with_reward(3, 0.75)
    assert [node.reward for node in made.nodes] == [None, None, None, 0.75, None, None, None, None]
    with pytest.raises(EpisodeError, match="a given node has a reward"):
        made.with_reward(2, 1.0)


def test_an_episode_is_bounded_in_nodes_and_in_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_graph, "MAX_NODES", 8)
    with pytest.raises(EpisodeFull, match="9 nodes, expected at most 8"):
        branching().append(Node.given(ids(1)))
    monkeypatch.setattr(episode_graph, "MAX_TOKENS", 10)
    with pytest.raises(EpisodeFull, match="11 tokens, expected at most 10"):
        branching()


def test_a_graph_travels_and_a_broken_one_is_refused() -> None:
    frame = encode(branching().with_reward(1, 0.25))
    came: EpisodeGraph = Decoder(EpisodeGraph).decode(frame)
    assert encode(came) == frame
    assert came.context(5).tolist() == [1, 2, 3, 5, 8]
    broken = frame.replace(b"\xa6parent\x06", b"\xa6parent\x07")
    with pytest.raises(WireError, match="node 7 continues node 7"):
        Decoder(EpisodeGraph).decode(broken)
