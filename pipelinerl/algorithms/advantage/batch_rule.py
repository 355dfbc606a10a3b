"""Rules over the advantages of a whole step: whitening and GPG's scale. They need every group of the step, hence run when a batch is cut.

Whitening over several processes: each makes `Moments` of its share, the moments are added, and all whiten by the sum. Whitening each share
by its own moments would give another gradient for every way of sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipelinerl.algorithms.advantage.outcome import Float64, Mask, ScoredGroup
from pipelinerl.algorithms.declare import batch

Credit = Float64 | list[Float64]
"""Advantages of one group: [N], or N arrays [P]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Count, mean and sum of squared deviations of some values; adding two gives those of the union (Chan et al.)."""

    count: int = 0
    mean: float = 0.0
    deviation: float = 0.0

    @classmethod
    def of(cls, values: Float64) -> Moments:
        if not len(values):
            return cls()
        mean = float(values.mean())
        return cls(count=len(values), mean=mean, deviation=float(((values - mean) ** 2).sum()))

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if not count:
            return self
        gap = other.mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + gap * other.count / count,
            deviation=self.deviation + other.deviation + gap**2 * self.count * other.count / count,
        )

    @property
    def variance(self) -> float:
        """Unbiased; 0 for fewer than two values."""
        return self.deviation / (self.count - 1) if self.count > 1 else 0.0


def whiten(values: Float64, *, moments: Moments, eps: float) -> Float64:
    """(values - mean) / sqrt(var + eps)."""
    return (values - moments.mean) / np.sqrt(moments.variance + eps)


@batch(source="verl")
def whiten_tokens(credits: Sequence[Credit], groups: Sequence[ScoredGroup], *, eps: float = 1e-8) -> list[Credit]:
    """(A - mean) / sqrt(var + eps) over the trained tokens of the step

    A sequence's number counts once per trained token. Positions that do not train stay 0.
    """
    pairs = list(zip(credits, groups, strict=True))
    total = sum((_token_moments(credit, group) for credit, group in pairs), start=Moments())
    return [_mapped(credit, group.masks(), lambda values: whiten(values, moments=total, eps=eps)) for credit, group in pairs]


@batch(source="GDPO, NeMo-RL", level="sequence")
def whiten_sequences(credits: Sequence[Credit], groups: Sequence[ScoredGroup], *, eps: float = 1e-8) -> list[Credit]:
    """(A - mean) / sqrt(var + eps) over the sequences of the step

    Raises `ValueError` for per-token advantages.
    """
    if any(isinstance(credit, list) for credit in credits):
        raise ValueError("whiten_sequences: got per-token advantages, expected one per sequence; use whiten_tokens")
    total = sum((Moments.of(np.asarray(credit)) for credit in credits), start=Moments())
    return [whiten(np.asarray(credit), moments=total, eps=eps) for credit in credits]


@batch(source="TRL scale_rewards='batch', with advantage dr_grpo")
def std_of_rewards(credits: Sequence[Credit], groups: Sequence[ScoredGroup], *, eps: float = 1e-4, ddof: int = 1) -> list[Credit]:
    """A / (std of the rewards of the step + eps)

    No group's own spread is amplified. Zeros where all rewards are equal.
    """
    rewards = np.concatenate([group.rewards for group in groups] or [np.zeros(0)])
    spread = float(rewards.std(ddof=ddof)) if len(rewards) > ddof else 0.0
    return [_mapped(credit, group.masks(), lambda values: values / (spread + eps)) for credit, group in zip(credits, groups, strict=True)]


@batch(source="GPG arXiv:2504.02546")
def gpg_alpha(credits: Sequence[Credit], groups: Sequence[ScoredGroup]) -> list[Credit]:
    """A * groups / groups with a nonzero advantage

    Groups without signal do not shrink a step; zero stays zero.
    """
    with_signal = sum(any(np.any(part) for part in (credit if isinstance(credit, list) else [credit])) for credit in credits)
    alpha = len(credits) / with_signal if with_signal else 0.0
    return [_mapped(credit, group.masks(), lambda values: alpha * values) for credit, group in zip(credits, groups, strict=True)]


def _token_moments(credit: Credit, group: ScoredGroup) -> Moments:
    if isinstance(credit, list):
        return Moments.of(
            np.concatenate([values[loss_mask] for values, loss_mask in zip(credit, group.masks(), strict=True)] or [np.zeros(0)])
        )
    return Moments.of(np.repeat(credit, group.lengths))


def _mapped(credit: Credit, masks: tuple[Mask, ...], change: Callable[[Float64], Float64]) -> Credit:
    if isinstance(credit, list):
        return [np.where(loss_mask, change(values), 0.0) for values, loss_mask in zip(credit, masks, strict=True)]
    return change(credit)
