"""The divergence of a model's whole distribution from a teacher's, token by token, without ever holding all logits of either.

The generalised Jensen-Shannon divergence of GKD (arXiv:2306.13649, equation 1), with m = mix q + (1 - mix) p, for the teacher's q and the
model's p: mix KL(q || m) + (1 - mix) KL(p || m); its ends are the forward KL(q || p), at mix 0, and the reverse KL(p || q), at mix 1, as
in TRL. Tables of logits are made in pieces, as `trainer.model.room` says, and thrown away; the backward pass makes them again. Where
tensor parallelism splits the vocabulary, both models' are split alike, and each rank adds up its words.

Legend: `K` tokens, `H` and `G` hidden sizes of model and teacher, `V` words of the vocabulary on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from trainer.model import head
from trainer.rows.packed_row import TeacherStates


def divergences(
    hidden: torch.Tensor, weight: torch.Tensor, teachers: Sequence[TeacherStates], *, mix: float, **options: Any
) -> torch.Tensor:
    """[K] float32 divergence from the teacher of each token, 0 where none judges it; `options` as `linear_divergence` has."""
    found = [
        linear_divergence(hidden if one.places is None else hidden[one.places], weight, one.hidden, one.head, mix=mix, **options)
        for one in teachers
    ]
    if len(found) == 1 and teachers[0].places is None:
        return found[0]
    whole = torch.zeros(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    for one, values in zip(teachers, found, strict=True):
        assert one.places is not None, "of several teachers, each says which tokens it judges"
        whole = whole.index_put((one.places,), values)
    return whole


def linear_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    mix: float,
    temperature: float,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return [K], float32 or wider, with gradient for `hidden` [K, H] and `weight` [V, H].

    Distributions are softmax(`hidden` @ `weight`.T / `temperature`), and the teacher's likewise, over the words of all ranks of `group`.
    """
    values: Any = _LinearDivergence.apply(hidden, weight, teacher_hidden, teacher_weight, mix, temperature, group)
    return values


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        teacher_hidden: torch.Tensor,
        teacher_weight: torch.Tensor,
        mix: float,
        temperature: float,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        sides = ((hidden, weight), (teacher_hidden, teacher_weight))
        normalisers = [_normalisers(*side, temperature=temperature, group=group) for side in sides]
        sums = torch.zeros(2, len(hidden), dtype=normalisers[0].dtype, device=hidden.device)
        for piece, log_p, log_q in _tables(sides, normalisers, temperature=temperature):
            log_m = _mixture(log_p, log_q, mix=mix)
            sums[0, piece] = (log_p.exp() * (log_p - log_m)).sum(-1)  # KL(p || m)
            sums[1, piece] = (log_q.exp() * (log_q - log_m)).sum(-1)  # KL(q || m)
        if group is not None:
            dist.all_reduce(sums, group=group)
        from_p, from_q = sums
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, *normalisers, from_p)
        ctx.options, ctx.group = (mix, temperature), group
        if mix in (0.0, 1.0):
            return (from_p if mix else from_q).clone()
        return mix * from_q + (1 - mix) * from_p

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_values: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, teacher_hidden, teacher_weight, *normalisers, from_p = ctx.saved_tensors
        mix, temperature = ctx.options
        to_hidden = torch.zeros_like(hidden)
        to_weight = torch.zeros(weight.shape, dtype=from_p.dtype, device=weight.device) if ctx.needs_input_grad[1] else None
        sides = ((hidden, weight), (teacher_hidden, teacher_weight))
        for piece, log_p, log_q in _tables(sides, normalisers, temperature=temperature):
            if mix == 0.0:
                slope = log_p.exp() - log_q.exp()
            else:  # d/dp is (1 - mix) log(p / m), and for the reverse KL log(p / q); then through the softmax
                scale = 1.0 if mix == 1.0 else 1.0 - mix
                slope = scale * log_p.exp() * (log_p - _mixture(log_p, log_q, mix=mix) - from_p[piece, None])
            to_logits = (slope * to_values[piece, None] / temperature).to(hidden.dtype)
            torch.mm(to_logits, weight, out=to_hidden[piece])
            if to_weight is not None:
                to_weight += to_logits.t() @ hidden[piece]
        if ctx.group is not None:
            dist.all_reduce(to_hidden, group=ctx.group)
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), None, None, None, None, None


Side = tuple[torch.Tensor, torch.Tensor]
"""Hidden states and output embedding of one of the two models."""


def _mixture(log_p: torch.Tensor, log_q: torch.Tensor, *, mix: float) -> torch.Tensor:
    """log m; of the ends, what the other distribution is compared with."""
    if mix in (0.0, 1.0):
        return log_q if mix else log_p
    return torch.logaddexp(log_p + math.log1p(-mix), log_q + math.log(mix))


def _tables(
    sides: tuple[Side, Side], normalisers: Sequence[torch.Tensor], *, temperature: float
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Pieces of the tokens, with log p and log q of each over this rank's words."""
    for piece in _pieces(*sides[0]):
        log_p, log_q = (
            _logits(hidden[piece], weight, temperature=temperature) - normaliser[piece, None]
            for (hidden, weight), normaliser in zip(sides, normalisers, strict=True)
        )
        yield piece, log_p, log_q


def _normalisers(hidden: torch.Tensor, weight: torch.Tensor, *, temperature: float, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[K] logarithm of the sum of exp(logits) over the words of all ranks."""
    found = torch.empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    for piece in _pieces(hidden, weight):
        found[piece] = _logits(hidden[piece], weight, temperature=temperature).logsumexp(-1)
    if group is None:
        return found
    peak = found.clone()
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    total = (found - peak).exp()
    dist.all_reduce(total, group=group)
    return peak + total.log()


def _pieces(hidden: torch.Tensor, weight: torch.Tensor) -> Iterator[slice]:
    length = head.num_tokens(len(weight), device=hidden.device)
    for start in range(0, len(hidden), length):
        yield slice(start, min(start + length, len(hidden)))


def _logits(hidden: torch.Tensor, weight: torch.Tensor, *, temperature: float) -> torch.Tensor:
    return (hidden @ weight.t()).to(torch.promote_types(hidden.dtype, torch.float32)) / temperature
