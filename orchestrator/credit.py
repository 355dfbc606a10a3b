"""Joins the method's advantage rules (`pipelinerl.algorithms.credit`) with trajectories: what `rules.batch` asks for each group."""

from __future__ import annotations

import numpy as np

from pipelinerl.algorithms.credit import group_advantages, keeps_group, token_columns
from pipelinerl.algorithms.credit.advantage import ScoredGroup
from pipelinerl.algorithms.method import Method
from pipelinerl.config import RewardSection
from pipelinerl.messages import Float32, ScoredTrajectory


class MethodCredit:
    """Advantages of scored siblings under one method; see `rules.batch.Credit`."""

    def __init__(self, method: Method, rewards: tuple[RewardSection, ...]) -> None:
        self._method = method
        self._weights = {reward.function.rpartition(":")[2]: reward.weight for reward in rewards}

    def __call__(self, survivors: tuple[ScoredTrajectory, ...]) -> list[Float32] | str:
        """One [L] float32 column for each survivor, or why the method's filter sets the group aside."""
        group = self._group(survivors)
        if not keeps_group(group, method=self._method):
            return str(self._method.group_filter.name)
        columns = token_columns(group_advantages(group, method=self._method), group=group)
        return [_whole_length(column, member) for column, member in zip(columns, survivors, strict=True)]

    def _group(self, survivors: tuple[ScoredTrajectory, ...]) -> ScoredGroup:
        masks = tuple(member.trajectory.trains[len(member.trajectory.prompt.token_ids) :] for member in survivors)
        names = list(self._weights)
        every = all(set(member.score.components) >= set(names) for member in survivors)
        return ScoredGroup(
            rewards=np.array([member.score.reward for member in survivors], np.float64),
            lengths=np.array([int(mask.sum()) for mask in masks], np.int64),
            components=np.array([[member.score.components[name] for name in names] for member in survivors]) if every else None,
            component_weights=np.array(list(self._weights.values())),
            trains=masks,
        )


def _whole_length(column: np.ndarray, member: ScoredTrajectory) -> Float32:
    """Put zeros for the prompt before the response's column."""
    whole = np.zeros(member.trajectory.num_tokens, np.float32)
    whole[len(member.trajectory.prompt.token_ids) :] = column
    return whole
