"""A quantile of |trainer - engine log-probability| over all tokens of a step, on all ranks, of which no list is kept.

Gaps are counted by size: a bin is what float32 numbers with the same exponent and first five bits of the mantissa share, so its ends differ
by at most 1/32 of the lower one, at every size. Counts add up over rows and ranks, which quantiles of rows do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

QUANTILE = 0.999
MIN_TOKENS = 1000
"""Fewest tokens of which it is taken: of fewer it is the largest, which grows with every token looked at."""
_DROPPED_BITS = 18
"""Of a float32: 23 of mantissa less 5. More makes bins coarser, fewer makes their table of counts larger (8,192 here)."""
_MAGNITUDE = 0x7FFFFFFF


class GapQuantile:
    """Counts of gaps by size; rows are added one by one, with no copy to the host."""

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros((_MAGNITUDE + 1) >> _DROPPED_BITS, dtype=torch.float64, device=device)

    def add(self, gaps: torch.Tensor, *, inside: torch.Tensor) -> None:
        """Count a row's gaps, [K] of any float dtype and nats, where `inside`, [K] bool, is true. NaN is the largest."""
        bins = (gaps.detach().float().contiguous().view(torch.int32) & _MAGNITUDE) >> _DROPPED_BITS
        self._counts.index_add_(0, bins.long(), inside.to(self._counts.dtype))

    def take(self, summed: Callable[[torch.Tensor], torch.Tensor]) -> float | None:
        """Return the quantile over what all ranks added, `summed` over them, and begin anew; None of fewer than `MIN_TOKENS`.

        It is the least upper end of a bin with at least `QUANTILE` of all gaps at or below it: at most 1/32 above the exact one.
        """
        counts = summed(self._counts.clone()).cpu()
        self.drop()
        total = float(counts.sum())
        if total < MIN_TOKENS:
            return None
        found = int(torch.searchsorted(counts.cumsum(0), math.ceil(QUANTILE * total)))
        last = ((found + 1) << _DROPPED_BITS) - 1
        return float(torch.tensor(last, dtype=torch.int32).view(torch.float32))

    def drop(self) -> None:
        """Forget the rows so far."""
        self._counts.zero_()
