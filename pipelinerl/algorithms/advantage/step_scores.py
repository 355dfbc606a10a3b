"""Token advantages from the step scores of a process reward model: four rules.

All tokens of step k get the credit of step k; tool tokens and positions after the last step get 0. Process and outcome parts keep their
own coefficients. Steps may be turns of an episode that branches: what follows a step is then the mean over its branches, see `graph`.
Legend as in `advantage`: `N` siblings, `P` positions, `K` steps of one sibling, s_k the score after step k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from pipelinerl.algorithms.advantage.graph import differences, following_sum, future_minimum, normalised_by_label, per_token
from pipelinerl.algorithms.advantage.outcome import Float64, ScoredGroup, StepScores, centred
from pipelinerl.algorithms.declare import advantage
from pipelinerl.algorithms.method import Need


@advantage(source="potential-based shaping", needs={Need.STEP_SCORES}, min_group=2)
def step_difference(group: ScoredGroup, *, process_coef: float = 1.0, outcome_coef: float = 1.0) -> list[Float64]:
    """step k: process_coef (s_k - s_{k-1}) + outcome_coef (R - mean_g)"""
    outcome = outcome_coef * centred(group.rewards)
    steps: tuple[StepScores, ...] = group.required("steps")
    credits = [process_coef * differences(sibling.scores, parents=sibling.parents) for sibling in steps]
    return _with_outcome(group, credits, outcome=outcome)


@advantage(source="PURE arXiv:2504.15275", needs={Need.STEP_SCORES}, min_group=2)
def step_min(group: ScoredGroup, *, process_coef: float = 1.0, outcome_coef: float = 1.0) -> list[Float64]:
    """step k: process_coef (min_{j>=k} s_j - mean over pooled steps) + outcome_coef (R - mean_g)"""
    steps: tuple[StepScores, ...] = group.required("steps")
    minima = [future_minimum(sibling.scores, parents=sibling.parents) for sibling in steps]
    pooled = np.concatenate(minima) if minima else np.zeros(0)
    baseline = float(pooled.mean()) if len(pooled) else 0.0
    outcome = outcome_coef * centred(group.rewards)
    return _with_outcome(group, [process_coef * (part - baseline) for part in minima], outcome=outcome)


@advantage(source="DeepSeekMath arXiv:2402.03300 section 4.1.3", needs={Need.STEP_SCORES}, min_group=2)
def step_grpo(group: ScoredGroup, *, pool: Literal["steps", "position"] = "steps", eps: float = 1e-6, ddof: int = 1) -> list[Float64]:
    """sum over this and the following steps of (s - mean) / (std + eps), statistics pooled over the group

    `pool` "steps" takes statistics over every step of every sibling; "position" over the k-th steps only, for siblings whose steps
    correspond. Step counts differ between siblings, so the two differ.
    """
    steps: tuple[StepScores, ...] = group.required("steps")
    labels = [np.arange(len(sibling.ends)) if pool == "position" else np.zeros(len(sibling.ends), dtype=np.int64) for sibling in steps]
    scores = normalised_by_label([sibling.scores for sibling in steps], labels, eps=eps, ddof=ddof)
    credits = [following_sum(part, parents=sibling.parents) for part, sibling in zip(scores, steps, strict=True)]
    return per_token(group, credits)


@advantage(source="ROLL", needs={Need.STEP_SCORES}, allows_stopped=True)
def step_reinforce(group: ScoredGroup, *, gamma: float = 1.0) -> list[Float64]:
    """step k: sum_{j>=k} gamma^(j-k) s_j"""
    steps: tuple[StepScores, ...] = group.required("steps")
    return per_token(group, [following_sum(sibling.scores, parents=sibling.parents, gamma=gamma) for sibling in steps])


def _with_outcome(group: ScoredGroup, credits: Sequence[Float64], *, outcome: Float64) -> list[Float64]:
    """N arrays [P]: step credits spread over their tokens, + one outcome per sibling on all trained tokens."""
    return per_token(group, [credit + own for credit, own in zip(credits, outcome, strict=True)], outside=outcome)
