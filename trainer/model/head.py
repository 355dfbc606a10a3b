"""Log-probability and entropy of chosen tokens from hidden states and the output embedding, without ever holding all logits.

The table of logits is computed in pieces, as large as `trainer.model.room` says. A small table is kept for the backward pass; of a larger
one the pieces are thrown away, and the backward pass computes them again. Where tensor parallelism splits the vocabulary, each rank holds a
part of every row, and two small reductions join them.

Legend: `K` tokens, `H` hidden size, `V` words of the vocabulary on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from trainer.model import room

_ITEM_BYTES = 4
"""Of a logit: they are float32."""


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    first_id: int = 0,
    group: dist.ProcessGroup | None = None,
    gives_square_sums: bool = False,
    softcap: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return ([K] float32 log-probability of `targets` [K], [K] float32 entropy in nats), both with gradient.

    With `gives_square_sums` also [K] float32, the sum of the squares of all probabilities, without gradient.

    They are those of softmax(`hidden` [K, H] @ `weight`.T / `temperature`) in float32. `weight` [V, H] holds the words from `first_id` on
    where the ranks of `group` split the vocabulary; `hidden` is then the same on all of them, and so is its gradient. With `softcap` c each
    product x is c tanh(x / c) before the temperature divides it, as in Gemma 2 (arXiv:2408.00118, section 2).
    """
    outputs: Any = _LinearLogprobs.apply(hidden, weight, targets - first_id, temperature, group, gives_square_sums, softcap)
    return outputs


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        gives_square_sums: bool,
        softcap: float | None,
    ) -> tuple[torch.Tensor, ...]:
        num, words = len(hidden), len(weight)
        is_here = (targets >= 0) & (targets < words)
        columns = targets.clamp(0, words - 1)
        peak, total, energy, chosen, squares = torch.empty(5, num, device=hidden.device)
        keeps = any(ctx.needs_input_grad[:2]) and num * words * _ITEM_BYTES <= room.kept_bytes(hidden.device)
        kept = torch.empty(num, words, device=hidden.device) if keeps else None
        tables = _Tables(num, words, count=2, device=hidden.device)
        for piece in tables.pieces:
            logits, powers = tables.of(piece)
            table = _logits(hidden[piece], weight, temperature, softcap, out=logits if kept is None else kept[piece])
            peak[piece] = table.amax(-1)
            torch.sub(table, peak[piece, None], out=logits)  # so that the differences below are between small numbers
            chosen[piece] = logits.gather(-1, columns[piece, None])[:, 0]
            torch.exp(logits, out=powers)
            total[piece] = powers.sum(-1)
            energy[piece] = torch.bmm(powers[:, None], logits[:, :, None])[:, 0, 0]
            if gives_square_sums:
                squares[piece] = torch.bmm(powers[:, None], powers[:, :, None])[:, 0, 0]
        if group is not None:
            below = peak.clone()
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
            below -= peak
            sums = torch.stack((total, energy + below * total)) * below.exp()
            sums = torch.cat((sums, (squares * (2 * below).exp())[None], (chosen + below).masked_fill(~is_here, 0.0)[None]))
            dist.all_reduce(sums, group=group)
            total, energy, squares, chosen = sums
        normaliser = peak + total.log()
        entropy = total.log() - energy / total
        ctx.save_for_backward(hidden, weight, columns, is_here, normaliser, entropy, kept)
        ctx.temperature, ctx.group, ctx.softcap = temperature, group, softcap
        ctx.set_materialize_grads(False)
        if not gives_square_sums:
            return chosen - total.log(), entropy
        squares = squares / total.square()
        ctx.mark_non_differentiable(squares)
        return chosen - total.log(), entropy, squares

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, to_logprobs: torch.Tensor | None, to_entropy: torch.Tensor | None, *_: None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, columns, is_here, normaliser, entropy, kept = ctx.saved_tensors
        to_logprobs = torch.zeros_like(normaliser) if to_logprobs is None else to_logprobs
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        tables = _Tables(len(hidden), len(weight), count=1 if to_entropy is None else 2, device=hidden.device)
        for piece in tables.pieces:
            logprobs, *others = tables.of(piece)
            table = _logits(hidden[piece], weight, ctx.temperature, ctx.softcap, out=logprobs) if kept is None else kept[piece]
            through_cap = None if ctx.softcap is None else 1 - (table * (ctx.temperature / ctx.softcap)).square()  # d tanh = 1 - tanh^2
            torch.sub(table, normaliser[piece, None], out=logprobs)
            slope = to_logprobs[piece, None].expand_as(logprobs)
            if to_entropy is not None:  # d entropy / d logit = -p (log p + entropy)
                slope = torch.add(logprobs, entropy[piece, None], out=others[0])
                slope.mul_(to_entropy[piece, None]).add_(to_logprobs[piece, None])
            to_logits = logprobs.exp_().mul_(slope).neg_()
            to_logits.scatter_add_(-1, columns[piece, None], (to_logprobs[piece] * is_here[piece])[:, None])
            if through_cap is not None:
                to_logits.mul_(through_cap)
            to_logits = to_logits.div_(ctx.temperature).to(hidden.dtype)
            torch.mm(to_logits, weight, out=to_hidden[piece])
            if to_weight is not None:
                _add_product(to_weight, to_logits.t(), hidden[piece])
        if ctx.group is not None:
            dist.all_reduce(to_hidden, group=ctx.group)
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), None, None, None, None, None


def num_tokens(words: int, *, device: torch.device) -> int:
    """Tokens of one piece of a table of logits over so many words."""
    return max(1, room.piece_bytes(device) // _ITEM_BYTES // max(1, words))


class _Tables:
    """The tables a piece needs, made once and used again for every piece: making them anew would hold the last piece's beside the next."""

    def __init__(self, num: int, words: int, *, count: int, device: torch.device) -> None:
        length = min(num_tokens(words, device=device), num)
        self.pieces = [slice(start, min(start + length, num)) for start in range(0, num, length)] if num else []
        self._tables = torch.empty(count, length, words, device=device)

    def of(self, piece: slice) -> tuple[torch.Tensor, ...]:
        """[piece, V] float32, each."""
        return self._tables[:, : piece.stop - piece.start].unbind()


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float, softcap: float | None, *, out: torch.Tensor) -> torch.Tensor:
    """Fill the table `out` [piece, V]."""
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    else:
        out.copy_(hidden @ weight.t())
    if softcap is not None:
        out.div_(softcap).tanh_().mul_(softcap)
    return out.div_(temperature)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a matrix product to a float32 total, in place where the factors are as precise."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
