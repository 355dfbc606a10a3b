"""Trajectories: a prompt and a completion end to end, or the nodes of an episode end to end; and the line of it that a reward is shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pipelinerl.data.episode_graph import EpisodeGraph, Node
from pipelinerl.messages import UNSAMPLED, Completion, Int32, Nodes, Prompt, Trajectory, Turns


def end_to_end(prompt: Prompt, completion: Completion, **facts: Any) -> Trajectory:
    """Lay a prompt and its completion end to end, in the engine's own token ids; `facts` are the other fields of a trajectory."""
    num_prompt = len(prompt.token_ids)
    versions = np.concatenate((np.full(num_prompt, UNSAMPLED, np.int32), completion.versions))
    return Trajectory(
        prompt=prompt,
        token_ids=np.concatenate((prompt.token_ids, completion.token_ids)),
        loss_mask=versions != UNSAMPLED,
        logprobs=np.concatenate((np.zeros(num_prompt, np.float32), completion.logprobs)),
        versions=versions,
        **facts,
    )


def trajectory_of(prompt: Prompt, graph: EpisodeGraph, *, recomputed: Iterable[tuple[int, int]] = (), **facts: Any) -> Trajectory:
    """Lay the nodes of an episode end to end, each once, without those that no turn follows; `facts` are a trajectory's other fields.

    Its first node is the prompt, in the prompt's own ids; a prompt without ids is none. `recomputed` are (node, sampled tokens of it)
    before which the KV cache was computed anew. A row of the trainer takes it whole, so it may have as many tokens as that.
    """
    num_prompt = len(prompt.token_ids)
    if num_prompt and not (graph.nodes and np.array_equal(graph.nodes[0].token_ids, prompt.token_ids)):
        raise ValueError(f"an episode of prompt {prompt.prompt_id} begins with other tokens than the prompt's")
    followed = graph.followed()
    kept = [i for i, node in enumerate(graph.nodes) if node.is_sampled or i in followed or (i == 0 and num_prompt)]
    nodes, new_index = [graph.nodes[i] for i in kept], {-1: -1} | {i: number for number, i in enumerate(kept)}
    parents = [new_index[node.parent] for node in nodes]
    starts = np.cumsum([0, *(node.num_tokens for node in nodes)]).tolist()
    versions = _joined([node.versions for node in nodes], np.int32)
    is_line = parents == list(range(-1, len(parents) - 1))
    lengths = np.array([node.num_tokens for node in nodes], np.int32)
    return Trajectory(
        prompt=prompt,
        token_ids=_joined([node.token_ids for node in nodes], np.int32),
        loss_mask=versions != UNSAMPLED,
        logprobs=_joined([node.logprobs for node in nodes], np.float32),
        versions=versions,
        turns=turns_of(nodes, parents, starts=[start - num_prompt for start in starts]),
        nodes=None if is_line else Nodes(parents=np.array(parents, np.int32), lengths=lengths),
        recomputed=tuple(sorted(starts[new_index[node]] - num_prompt + at for node, at in recomputed)),
        **facts,
    )


def turns_of(nodes: Sequence[Node], parents: Sequence[int], *, starts: Sequence[int]) -> Turns | None:
    """Return the sampled ones of these nodes, which begin at `starts`, as turns; None where there is none."""
    turn_of: dict[int, int] = {-1: -1}
    """The last turn up to each node."""
    sampled: list[int] = []
    before: list[int] = []
    for index, (node, parent) in enumerate(zip(nodes, parents, strict=True)):
        turn_of[index] = turn_of[parent]
        if node.is_sampled:
            before.append(turn_of[parent])
            turn_of[index] = len(sampled)
            sampled.append(index)
    if not sampled:
        return None
    firsts = [starts[index] for index in sampled]
    lasts = [start + nodes[index].num_tokens - 1 for start, index in zip(firsts, sampled, strict=True)]
    is_line = before == list(range(-1, len(before) - 1))
    is_line &= all(start > end + 1 for start, end in zip(firsts[1:], lasts, strict=False))
    rewards = [nodes[index].reward for index in sampled]
    has_rewards = any(reward is not None for reward in rewards)
    return Turns(
        starts=np.array(firsts, np.int32),
        ends=np.array(lasts, np.int32),
        states=tuple(nodes[index].state for index in sampled),
        parents=None if is_line else np.array(before, np.int32),
        rewards=np.array([reward or 0.0 for reward in rewards], np.float32) if has_rewards else None,
    )


def last_line(trajectory: Trajectory) -> tuple[Int32, Turns | None]:
    """Return (tokens after the prompt, turns) up to the last turn: all of a rollout that is one sequence, else the path to that turn.

    A path that does not begin with the prompt, after a compaction for instance, is returned from its root on.
    """
    num_prompt = len(trajectory.prompt.token_ids)
    if trajectory.nodes is None or trajectory.turns is None:
        return trajectory.token_ids[num_prompt:], trajectory.turns
    parents, ends = trajectory.nodes.parents.tolist(), np.cumsum(trajectory.nodes.lengths).tolist()
    path = [len(parents) - 1]  # a turn, since nodes that no turn follows are left out
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    if path[-1] == 0 and num_prompt:
        path.pop()
    states = dict(zip((trajectory.turns.starts + num_prompt).tolist(), trajectory.turns.states, strict=True))
    nodes = []
    for node in reversed(path):
        span = slice(ends[node] - int(trajectory.nodes.lengths[node]), ends[node])
        columns = {name: getattr(trajectory, name)[span] for name in ("token_ids", "logprobs", "versions")}
        nodes.append(Node(parent=len(nodes) - 1, state=states.get(span.start, ""), **columns))
    starts = np.cumsum([0, *(node.num_tokens for node in nodes)]).tolist()
    return _joined([node.token_ids for node in nodes], np.int32), turns_of(nodes, list(range(-1, len(nodes) - 1)), starts=starts)


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts])
