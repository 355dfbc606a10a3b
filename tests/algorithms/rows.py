"""Rows for the tests of the loss: sequences as plain lists, laid end to end into columns."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pipelinerl.algorithms.loss import LossSums, StepStatistics, TokenColumns, policy_loss
from pipelinerl.algorithms.method import Method, Need
from pipelinerl.algorithms.methods import resolve

EVERYTHING = frozenset(Need)
"""A run that offers whatever a rule may need."""


DIVERGES = 0.7
"""Divergence from the reference's distribution over this times the squared difference of the sampled token: some function of the policy."""


@dataclass(frozen=True, kw_only=True)
class Seq:
    """One sequence; all lists have one entry per token."""

    logprobs: list[float]
    behaviour: list[float]
    advantages: list[float]
    loss_mask: list[bool] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    old: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    weight: float = 1.0
    correct: bool = False
    truncated: bool = False

    def trained(self) -> list[bool]:
        return self.loss_mask or [True] * len(self.logprobs)


def random_seq(generator: random.Random, *, length: int, holes: bool = True, weight: float = 1.0) -> Seq:
    """A sequence whose log-probabilities drift between policies, with tool tokens in it where `holes`."""
    logprobs = [generator.uniform(-3.0, -0.05) for _ in range(length)]

    def drifted(width: float) -> list[float]:
        return [min(-0.01, x + generator.gauss(0, width)) for x in logprobs]

    advantage = generator.gauss(0, 1)
    versions = sorted(generator.randint(2, 5) for _ in range(length))
    loss_mask = [generator.random() > 0.25 if holes else True for _ in range(length)]
    return Seq(
        logprobs=logprobs,
        behaviour=drifted(0.3),
        old=drifted(0.2),
        reference=drifted(0.4),
        advantages=[advantage] * length,
        loss_mask=loss_mask,
        versions=versions,
        entropy=[generator.uniform(0.1, 2.0) for _ in range(length)],
        weight=weight,
        correct=advantage > 0,
    )


def pack(sequences: Sequence[Seq], *, dtype: torch.dtype = torch.float64, trained_version: int = 5) -> TokenColumns:
    """Lay sequences end to end; `logprobs` is a leaf that takes a gradient."""

    def flat(name: str) -> list[Any]:
        return [value for sequence in sequences for value in getattr(sequence, name)]

    def optional(name: str) -> torch.Tensor | None:
        return (
            torch.tensor(flat(name), dtype=dtype) if all(getattr(sequence, name) for sequence in sequences if sequence.logprobs) else None
        )

    num_tokens = len(flat("logprobs"))
    loss_mask = torch.tensor([flag for sequence in sequences for flag in sequence.trained()], dtype=torch.bool)
    leaf, reference = torch.tensor(flat("logprobs"), dtype=dtype, requires_grad=True), optional("reference")
    return TokenColumns(
        logprobs=leaf,
        behaviour_logprobs=torch.tensor(flat("behaviour"), dtype=dtype),
        advantages=torch.tensor(flat("advantages"), dtype=dtype),
        loss_mask=loss_mask,
        versions=torch.tensor(flat("versions") or [0] * num_tokens, dtype=torch.int32),
        sequence_ids=torch.tensor([i for i, sequence in enumerate(sequences) for _ in sequence.logprobs], dtype=torch.int64),
        trained_version=trained_version,
        entropy=optional("entropy"),
        reference_logprobs=reference,
        divergence=None if reference is None else DIVERGES * torch.where(loss_mask, leaf - reference, 0).square(),
        old_logprobs=optional("old"),
        weights=torch.tensor([sequence.weight for sequence in sequences], dtype=dtype),
        correct=torch.tensor([sequence.correct for sequence in sequences], dtype=torch.bool),
        truncated=torch.tensor([sequence.truncated for sequence in sequences], dtype=torch.bool),
    )


def method_of(name: str, /, **overrides: Any) -> Method:
    """A resolved method in a run that offers everything, and trains a step twice, so that every proximal policy is another than pi."""
    return resolve(name, overrides, group_size=8, offers=EVERYTHING, has_critic=True, epochs=2)


def loss_and_gradient(
    sequences: Sequence[Seq], *, method: Method, dtype: torch.dtype = torch.float64, statistics: StepStatistics | None = None
) -> tuple[float, list[float], LossSums]:
    """Raw loss of one row, its gradient by token, and the whole result."""
    columns = pack(sequences, dtype=dtype)
    sums = policy_loss(columns, method=method, statistics=statistics)
    sums.loss.backward()
    assert columns.logprobs.grad is not None
    return float(sums.loss.detach()), columns.logprobs.grad.tolist(), sums


def single(logprob: float, *, behaviour: float, advantage: float, **columns: Any) -> Seq:
    """A sequence of one token."""
    return Seq(logprobs=[logprob], behaviour=[behaviour], advantages=[advantage], **columns)


def changed(sequence: Seq, **columns: Any) -> Seq:
    return dataclasses.replace(sequence, **columns)
