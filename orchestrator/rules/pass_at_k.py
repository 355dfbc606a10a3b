"""The summary of several samples for each held-out prompt: the mean reward, and the chance that one of k is correct."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(*, num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that at least one of `k` samples of a prompt is correct, given how many of `num_samples` were.

    The value is 1 - C(n - c, k) / C(n, k), unbiased for every k <= n (Chen et al., arXiv:2107.03374, eq. 1), where 1 - (1 - c/n)^k is not.
    Raises `ValueError` unless 1 <= k <= n.
    """
    if not 0 < k <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples: expected 1 <= k <= {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def mean_pass_at(corrects: Sequence[int], *, num_samples: int) -> dict[int, float]:
    """Return, for k = every power of two up to `num_samples` and `num_samples` itself, the mean pass@k over prompts.

    `corrects` holds the number of correct samples of each prompt.
    """
    ks = sorted({num_samples, *(2**power for power in range(num_samples.bit_length()) if 2**power <= num_samples)})
    return {k: sum(pass_at_k(num_samples=num_samples, num_correct=c, k=k) for c in corrects) / len(corrects) for k in ks}
