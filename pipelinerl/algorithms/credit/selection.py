"""Which groups train. A filter decides about whole groups, never about rows of one: a row taken out would change its siblings' baseline.

A filtered group changes the batch and its denominators, by design; a mask does not. Group statistics are those of the scored rewards.
"""

from __future__ import annotations

import numpy as np

from pipelinerl.algorithms.credit.advantage import ScoredGroup


def has_spread(group: ScoredGroup, *, tolerance: float) -> bool:
    """Whether rewards differ by more than `tolerance`. With 0, rounding noise in equal rewards would pass as signal."""
    return len(group.rewards) > 1 and float(np.ptp(group.rewards)) > tolerance


def within_accuracy(group: ScoredGroup, *, low: float, high: float) -> bool:
    """Whether the fraction of correct siblings lies in [low, high]."""
    correct = group.required("correct")
    return len(correct) > 0 and low <= float(np.mean(correct)) <= high
