"""Reward shaping: named changes to a group's rewards before the advantage. Each is its own log line; none hides inside an actor."""

from __future__ import annotations

import dataclasses

import numpy as np

from pipelinerl.algorithms.advantage.outcome import Float64, Int64, ScoredGroup
from pipelinerl.algorithms.declare import shaping
from pipelinerl.algorithms.method import Need


def overlong_penalties(lengths: Int64, *, max_tokens: float, buffer_tokens: float, factor: float) -> Float64:
    """[N] soft penalty for answers longer than max_tokens - buffer_tokens: 0 up to there, -factor at max_tokens (arXiv:2503.14476)."""
    excess = (lengths - (max_tokens - buffer_tokens)) / buffer_tokens
    return -factor * np.clip(excess, 0.0, 1.0).astype(np.float64)


@shaping(source="DAPO arXiv:2503.14476 (20480, 4096)")
def overlong_penalty(group: ScoredGroup, *, max_tokens: float, buffer_tokens: float, factor: float = 1.0) -> ScoredGroup:
    """R += factor * min(0, -(L - (max_tokens - buffer_tokens)) / buffer_tokens), not below -factor"""
    penalties = overlong_penalties(group.lengths, max_tokens=max_tokens, buffer_tokens=buffer_tokens, factor=factor)
    return dataclasses.replace(group, rewards=group.rewards + penalties)


@shaping(source="PipelineRL", needs={Need.TOKEN_KL})
def minus_token_kl(group: ScoredGroup, *, coef: float) -> ScoredGroup:
    """R -= coef * sum_t (log mu - log ref)"""
    sums = [float(kl[loss_mask].sum()) for kl, loss_mask in zip(group.required("token_kl"), group.masks(), strict=True)]
    return dataclasses.replace(group, rewards=group.rewards - coef * np.array(sums, dtype=np.float64))
