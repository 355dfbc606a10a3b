"""A micro-batch holds the samples of a row end to end, one column for each thing that the trainer needs of a token or a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipelinerl.data.expert_routes import joined
from pipelinerl.data.images import each_once
from pipelinerl.errors import DataError
from pipelinerl.messages import Finish, MicroBatch, Nodes, Sample, Trajectory


def micro_batch_of(samples: tuple[Sample, ...], *, step: int, index: int, teachers: Sequence[str] = (), loss: str = "") -> MicroBatch:
    """Lay samples end to end; without samples this is the zero-loss row. Raises `DataError` where a row names none of `teachers`."""
    trajectories = [sample.trajectory for sample in samples]
    prompts = [trajectory.prompt for trajectory in trajectories]
    images, images_of = each_once([prompt.images for prompt in prompts])
    named = [teacher_of(prompt.columns, teachers, where=f"prompt {prompt.prompt_id}") for prompt in prompts if teachers]
    return MicroBatch(
        step=step,
        index=index,
        token_ids=_join([trajectory.token_ids for trajectory in trajectories], np.int32),
        loss_mask=_join([trajectory.loss_mask for trajectory in trajectories], np.bool_),
        logprobs=_join([trajectory.logprobs for trajectory in trajectories], np.float32),
        versions=_join([trajectory.versions for trajectory in trajectories], np.int32),
        advantages=_join([sample.advantages for sample in samples], np.float32),
        lengths=np.array([trajectory.num_tokens for trajectory in trajectories], np.int32),
        rollout_ids=tuple(trajectory.rollout_id for trajectory in trajectories),
        rewards=np.array([sample.reward for sample in samples], np.float32),
        truncated=np.array([trajectory.finish is Finish.LENGTH for trajectory in trajectories], np.bool_),
        group_ids=np.array([trajectory.group_id for trajectory in trajectories], np.int32),
        engine_ids=np.array([trajectory.engine_id for trajectory in trajectories], np.int32),
        weights=np.array([sample.weight for sample in samples], np.float32) if any(sample.weight != 1.0 for sample in samples) else None,
        teacher_ids=np.array(named, np.int32) if teachers else None,
        routes=joined([trajectory.routes for trajectory in trajectories], lengths=[trajectory.num_tokens for trajectory in trajectories]),
        nodes=_nodes_of(trajectories),
        loss=loss,
        images=images,
        images_of=images_of,
    )


def teacher_of(columns: Mapping[str, Any], teachers: Sequence[str], *, where: str) -> int:
    """Return the index of the teacher that a row names. Raises `DataError` where it names none of `teachers`."""
    if (name := columns.get("teacher")) not in teachers:
        raise DataError(f"{where}: column teacher is {name!r}, expected one of {', '.join(teachers)} (reference.teachers)")
    return tuple(teachers).index(str(name))


def _nodes_of(trajectories: Sequence[Trajectory]) -> Nodes | None:
    """Return the nodes of all samples, one for a sample that is one sequence; None where every one is."""
    if all(trajectory.nodes is None for trajectory in trajectories):
        return None
    parents: list[int] = []
    lengths: list[int] = []
    for trajectory in trajectories:
        if trajectory.nodes is None:
            parents.append(-1)
            lengths.append(trajectory.num_tokens)
        else:
            first = len(parents)
            parents += [parent if parent < 0 else first + parent for parent in trajectory.nodes.parents.tolist()]
            lengths += trajectory.nodes.lengths.tolist()
    return Nodes(parents=np.array(parents, np.int32), lengths=np.array(lengths, np.int32))


def _join(columns: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(columns) if columns else np.zeros(0, dtype)
