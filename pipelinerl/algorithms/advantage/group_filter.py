"""Group filters decide which groups train: whole groups, never rows of one. A row taken out would change its siblings' baseline.

A filtered group changes the batch and its denominators, by design; a mask does not. Group statistics are those of the scored rewards.
A filter gives true where the group trains; its formula says when the group is set aside.
"""

from __future__ import annotations

import numpy as np

from pipelinerl.algorithms.advantage.outcome import ScoredGroup
from pipelinerl.algorithms.declare import group_filter
from pipelinerl.algorithms.method import Need


@group_filter(source="DAPO arXiv:2503.14476; refill as verl max_num_gen_batches")
def zero_variance(group: ScoredGroup, *, tolerance: float = 1e-6) -> bool:
    """set aside when max R - min R <= tolerance; refilled, up to `refill` batches' worth of groups per step

    With a tolerance of 0, rounding noise in equal rewards would pass as signal.
    """
    return len(group.rewards) > 1 and float(np.ptp(group.rewards)) > tolerance


@group_filter(source="PRIME arXiv:2502.01456", needs={Need.CORRECT})
def accuracy_band(group: ScoredGroup, *, low: float = 0.2, high: float = 0.8) -> bool:
    """set aside unless low <= mean_g(correct) <= high; refilled likewise"""
    correct = group.required("correct")
    return len(correct) > 0 and low <= float(np.mean(correct)) <= high
