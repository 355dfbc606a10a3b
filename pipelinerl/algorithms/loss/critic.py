"""Losses of the models that judge: the value function and the implicit process reward model. Raw sums, divided once per step.

`T` tokens, `N` sequences. Tokens that do not train enter nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pipelinerl.algorithms.declare import critic
from pipelinerl.algorithms.loss.columns import Segments, masked
from pipelinerl.algorithms.method import Need


@critic(name="clipped", source="PPO arXiv:1707.06347; verl cliprange_value", needs={Need.CRITIC})
def clipped_value_loss(
    values: Tensor, *, old_values: Tensor, returns: Tensor, loss_mask: Tensor, clip: float = 0.5
) -> tuple[Tensor, Tensor]:
    """0.5 max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2)

    Gives the sum over trained tokens, and the number of clipped ones. The maximum, not the minimum: clipping may only make the loss
    larger, never hide an error (verl). All inputs [T].
    """
    value = masked(values, loss_mask)
    old, target = masked(old_values.detach(), loss_mask, like=value), masked(returns.detach(), loss_mask, like=value)
    bounded = torch.clamp(value, old - clip, old + clip)
    plain, cut = (value - target).square(), (bounded - target).square()
    return 0.5 * torch.maximum(plain, cut).sum(), (cut > plain).sum()


@critic(name="huber", source="Huber 1964", needs={Need.CRITIC})
def huber_value_loss(values: Tensor, *, returns: Tensor, loss_mask: Tensor, delta: float = 1.0) -> tuple[Tensor, Tensor]:
    """(V - G)^2 / 2 while |V - G| <= delta, else delta (|V - G| - delta / 2): an outlier pulls no harder than delta

    Gives the sum over trained tokens, and the number of those beyond `delta`. All inputs [T].
    """
    value = masked(values, loss_mask)
    target = masked(returns.detach(), loss_mask, like=value)
    return F.huber_loss(value, target, reduction="sum", delta=delta), ((value - target).abs() > delta).sum()


@critic(
    name="implicit_prm",
    source="PRIME arXiv:2502.01456",
    needs={Need.IMPLICIT_PRM, Need.REFERENCE_LOGPROBS, Need.CORRECT},
)
def implicit_prm_loss(
    logprobs: Tensor, *, reference_logprobs: Tensor, correct: Tensor, sequences: Segments, beta: float = 0.05
) -> tuple[Tensor, Tensor]:
    """BCE(sigmoid(beta sum_t (log phi - log ref)), correct), mean over sequences

    Gives the sum over sequences, and how many it tells rightly. `logprobs` [T] of phi with gradient, `reference_logprobs` [T],
    `correct` [N]. Divide by the number of sequences.
    """
    trained = masked(logprobs, sequences.loss_mask)
    log_ratio = trained - masked(reference_logprobs.detach(), sequences.loss_mask, like=trained)
    logits = beta * sequences.sum(log_ratio)
    loss = F.binary_cross_entropy_with_logits(logits, correct.to(logits.dtype), reduction="sum")
    return loss, ((logits > 0) == correct).sum()
