"""A rollout that an agent outside of the run has played: what it may ask for, and the trajectory that comes of it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from orchestrator.rollouts import trajectories
from orchestrator.rollouts.multi_turn import FIRST_STATE
from orchestrator.rollouts.rollout import Rollout
from orchestrator.rules.validation.violations import Kind, Violation
from pipelinerl.data.episode_graph import EpisodeGraph
from pipelinerl.messages import NO_NODE, UNSAMPLED, AgentTurn, Finish, Lent, Trajectory


def wrong_turn(asked: AgentTurn, graph: EpisodeGraph, *, vocabulary: int | None) -> Violation | None:
    """Return the violation in a turn that a gateway asks for, or None: it goes on from a sampled turn, with tokens of the vocabulary."""
    if asked.parent != NO_NODE and not (0 <= asked.parent < len(graph.nodes) and graph.nodes[asked.parent].is_sampled):
        expected = f"one of the turns of an episode of {len(graph.nodes)} nodes, or {NO_NODE}"
        return Violation(kind=Kind.UNASKED, words=f"AgentTurn: it continues node {asked.parent}, expected {expected}")
    low, high = int(asked.token_ids.min()), int(asked.token_ids.max())
    if low < 0 or (vocabulary is not None and high >= vocabulary):
        expected = "0 or more" if vocabulary is None else f"0 to {vocabulary - 1}"
        return Violation(kind=Kind.TOKENS, words=f"AgentTurn: token ids from {low} to {high}, expected {expected}")
    if asked.max_tokens < 1 or asked.chunk_tokens < 0:
        return Violation(kind=Kind.BOUNDS, words=f"AgentTurn: {asked.max_tokens} tokens in chunks of {asked.chunk_tokens}, expected from 1")
    return None


def trajectory_of(
    rollout: Rollout,
    graph: EpisodeGraph,
    *,
    reward: float | None,
    error: str,
    engine_id: int,
    finish: Finish,
    finished_at: float,
    episode: str = "",
) -> Trajectory:
    """Return the trajectory of an attempt that has ended, with the `error` by which it failed, if any.

    Its prompt is what the agent's first turn answers; contexts of their own (sub-agents, what follows a compaction) are nodes beside it.
    """
    facts: dict[str, Any] = {
        "rollout_id": rollout.rollout_id,
        "attempt": rollout.attempt,
        "group_id": rollout.group_id,
        "sibling": rollout.sibling,
        "is_greedy": rollout.is_greedy,
        "engine_id": engine_id,
        "admitted_at": rollout.admitted_at,
        "finished_at": finished_at,
    }
    if not graph.nodes or error:
        return _failed(rollout, error=error or "the agent finished without a turn of the model", **facts)
    prompt = msgspec.structs.replace(rollout.prompt, token_ids=graph.nodes[0].token_ids)
    lent = Lent(prompt_token_ids=prompt.token_ids, reward=reward, episode=episode)
    return trajectories.trajectory_of(prompt, graph, finish=finish, lent=lent, **facts)


def state_of_next(graph: EpisodeGraph) -> str:
    """Name the state that the next turn answers: the first, or the turn's number, since nobody tells which are equal."""
    number = sum(node.is_sampled for node in graph.nodes)
    return f"turn {number}" if number else FIRST_STATE


def _failed(rollout: Rollout, *, error: str, **facts: Any) -> Trajectory:
    num = len(rollout.prompt.token_ids)
    return Trajectory(
        prompt=rollout.prompt,
        token_ids=rollout.prompt.token_ids,
        loss_mask=np.zeros(num, np.bool_),
        logprobs=np.zeros(num, np.float32),
        versions=np.full(num, UNSAMPLED, np.int32),
        finish=Finish.ERROR,
        error=error,
        **facts,
    )
