"""Losses of the models that judge: the value function and the implicit process reward model. Raw sums, divided once per step.

`T` tokens, `N` sequences. Tokens that do not train enter nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pipelinerl.algorithms.loss.columns import Segments, masked


def clipped_value_loss(values: Tensor, *, old_values: Tensor, returns: Tensor, trains: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Sum over trained tokens of 0.5 max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2), and the number of clipped ones.

    The maximum, not the minimum: clipping may only make the loss larger, never hide an error (verl). All inputs [T].
    """
    value = masked(values, trains)
    old, target = masked(old_values.detach(), trains, like=value), masked(returns.detach(), trains, like=value)
    bounded = torch.clamp(value, old - clip, old + clip)
    plain, cut = (value - target).square(), (bounded - target).square()
    return 0.5 * torch.maximum(plain, cut).sum(), (cut > plain).sum()


def huber_value_loss(values: Tensor, *, returns: Tensor, trains: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """Sum over trained tokens of the Huber loss of V - G, and the number of those beyond `delta`, where its slope stays. All inputs [T]."""
    value = masked(values, trains)
    target = masked(returns.detach(), trains, like=value)
    return F.huber_loss(value, target, reduction="sum", delta=delta), ((value - target).abs() > delta).sum()


def implicit_prm_loss(
    logprobs: Tensor, *, reference_logprobs: Tensor, correct: Tensor, sequences: Segments, beta: float
) -> tuple[Tensor, Tensor]:
    """Sum over sequences of BCE(sigmoid(beta sum_t (log phi - log ref)), correct) (PRIME, arXiv:2502.01456), and how many it tells rightly.

    `logprobs` [T] of phi with gradient, `reference_logprobs` [T], `correct` [N]. Divide by the number of sequences.
    """
    trained = masked(logprobs, sequences.trains)
    log_ratio = trained - masked(reference_logprobs.detach(), sequences.trains, like=trained)
    logits = beta * sequences.sum(log_ratio)
    loss = F.binary_cross_entropy_with_logits(logits, correct.to(logits.dtype), reduction="sum")
    return loss, ((logits > 0) == correct).sum()
