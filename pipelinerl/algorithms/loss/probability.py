"""Arithmetic on the probability of one sampled token."""

from __future__ import annotations

import torch
from torch import Tensor


def binary_kl(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """[T] KL(p || q) of "this token or any other": p log(p/q) + (1-p) log((1-p)/(1-q)), from log p and log q, both <= 0.

    1 - p and 1 - q are kept above the dtype's resolution, else a token of probability 1 would give an infinite KL to one of
    probability 1 - 1e-9.
    """
    p = logprobs.exp()
    smallest = torch.finfo(logprobs.dtype).eps
    rest, other_rest = _rest(logprobs, smallest), _rest(other_logprobs, smallest)
    return p * (logprobs - other_logprobs) + rest * (rest / other_rest).log()


def _rest(logprobs: Tensor, smallest: float) -> Tensor:
    return (-torch.expm1(logprobs)).clamp(min=smallest)
