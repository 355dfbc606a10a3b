"""This rule measures how much samples repeat themselves: the part of a sample's n-grams that occurred in it before (seq-rep-n of arXiv
1908.04319).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

NGRAM = 4
LEAST_TOKENS = 32
"""Samples with fewer tokens say nothing about loops, and are left out."""
MOST_SAMPLES, MOST_TOKENS = 32, 4096
"""The samples examined in a step, evenly chosen, and the last tokens examined of each, where loops are: a few milliseconds of the
orchestrator's time.
"""


def repeated_fraction(samples: Sequence[npt.NDArray[np.integer]]) -> float | None:
    """Return the repeated part, from 0 to 1, as the mean over samples ([T] sampled token ids each); None where none is long enough."""
    long = [sample for sample in samples if len(sample) >= LEAST_TOKENS]
    chosen = long[:: -(-len(long) // MOST_SAMPLES)] if long else []
    parts = [1 - _num_distinct(sample[-MOST_TOKENS:]) / (min(len(sample), MOST_TOKENS) - NGRAM + 1) for sample in chosen]
    return float(np.mean(parts)) if parts else None


def _num_distinct(sample: npt.NDArray[np.integer]) -> int:
    windows = np.lib.stride_tricks.sliding_window_view(np.ascontiguousarray(sample, dtype=np.int64), NGRAM)
    return len(np.unique(windows, axis=0))
