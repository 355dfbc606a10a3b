"""Token advantages from the step scores of a process reward model: five rules.

All tokens of step k get the credit of step k; tool tokens and positions after the last step get 0. Process and outcome parts keep their
own coefficients. Legend as in `advantage`: `N` siblings, `P` positions, `K` steps of one sibling, s_k the score after step k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from pipelinerl.algorithms.advantage.outcome import Float64, Int64, ScoredGroup, StepScores, centred, normalised
from pipelinerl.algorithms.advantage.token_advantage import spread
from pipelinerl.algorithms.declare import advantage
from pipelinerl.algorithms.method import Need


def differences(scores: Float64) -> Float64:
    """[K] s_k - s_{k-1} with s_0 = 0: a potential, so the credits of a sequence sum to its last score."""
    return np.diff(scores, prepend=0.0)


def future_minimum(scores: Float64) -> Float64:
    """[K] min over this and the following steps (PURE, arXiv:2504.15275): padding with easy steps cannot raise it, as it would a sum."""
    return np.minimum.accumulate(scores[::-1])[::-1] if len(scores) else scores


def following_sum(values: Float64, *, gamma: float = 1.0) -> Float64:
    """[K] sum_{j>=k} gamma^(j-k) values_j."""
    sums = np.zeros_like(values)
    running = 0.0
    for k in range(len(values) - 1, -1, -1):
        running = float(values[k]) + gamma * running
        sums[k] = running
    return sums


@advantage(source="potential-based shaping", needs={Need.STEP_SCORES}, min_group=2)
def step_difference(group: ScoredGroup, *, process_coef: float = 1.0, outcome_coef: float = 1.0) -> list[Float64]:
    """step k: process_coef (s_k - s_{k-1}) + outcome_coef (R - mean_g)"""
    outcome = outcome_coef * centred(group.rewards)
    return _per_token(group, lambda sibling, steps: process_coef * differences(steps.scores), outcome=outcome)


@advantage(source="PURE arXiv:2504.15275", needs={Need.STEP_SCORES}, min_group=2)
def step_min(group: ScoredGroup, *, process_coef: float = 1.0, outcome_coef: float = 1.0) -> list[Float64]:
    """step k: process_coef (min_{j>=k} s_j - mean over pooled steps) + outcome_coef (R - mean_g)"""
    steps: tuple[StepScores, ...] = group.required("steps")
    minima = [future_minimum(sibling.scores) for sibling in steps]
    pooled = np.concatenate(minima) if minima else np.zeros(0)
    baseline = float(pooled.mean()) if len(pooled) else 0.0
    outcome = outcome_coef * centred(group.rewards)
    return _per_token(group, lambda sibling, _: process_coef * (minima[sibling] - baseline), outcome=outcome)


@advantage(source="DeepSeekMath arXiv:2402.03300 section 4.1.3", needs={Need.STEP_SCORES}, min_group=2)
def step_grpo(group: ScoredGroup, *, pool: Literal["steps", "position"] = "steps", eps: float = 1e-6, ddof: int = 1) -> list[Float64]:
    """sum over this and the following steps of (s - mean) / (std + eps), statistics pooled over the group

    `pool` "steps" takes statistics over every step of every sibling; "position" over the k-th steps only, for siblings whose steps
    correspond. Step counts differ between siblings, so the two differ.
    """
    steps: tuple[StepScores, ...] = group.required("steps")
    labels = [np.arange(len(sibling.ends)) if pool == "position" else np.zeros(len(sibling.ends), dtype=np.int64) for sibling in steps]
    scores = _normalised_by_label([sibling.scores for sibling in steps], labels, eps=eps, ddof=ddof)
    return _per_token(group, lambda sibling, _: following_sum(scores[sibling]))


@advantage(source="ROLL", needs={Need.STEP_SCORES}, allows_stopped=True)
def step_reinforce(group: ScoredGroup, *, gamma: float = 1.0) -> list[Float64]:
    """step k: sum_{j>=k} gamma^(j-k) s_j"""
    return _per_token(group, lambda _, steps: following_sum(steps.scores, gamma=gamma))


@advantage(
    source="GiGPO arXiv:2505.10978, constants as its code, whose default mode divides by no std: divide_by_std = false",
    needs={Need.ANCHORS},
    min_group=2,
)
def gigpo(
    group: ScoredGroup, *, weight: float = 1.0, gamma: float = 0.95, divide_by_std: bool = True, eps: float = 1e-6, ddof: int = 1
) -> list[Float64]:
    """(R - mean_g)/(std_g + eps) + weight * the same over R discounted by the turns to come, from equal anchor states

    A state that only one step left has no baseline and adds nothing.
    """
    steps: tuple[StepScores, ...] = group.required("steps")
    if any(sibling.anchors is None for sibling in steps):
        raise ValueError("gigpo: StepScores without anchors; the environment must name the state each step started from")
    returns = [following_sum(sibling.scores, gamma=gamma) for sibling in steps]
    labels = [np.asarray(sibling.anchors) for sibling in steps]
    inner = _normalised_by_label(returns, labels, eps=eps, ddof=ddof, divide=divide_by_std)
    episode = normalised(group.rewards, eps=eps, ddof=ddof) if divide_by_std else centred(group.rewards)
    return _per_token(group, lambda sibling, _: weight * inner[sibling], outcome=episode)


def _per_token(group: ScoredGroup, credit: Callable[[int, StepScores], Float64], *, outcome: Float64 | None = None) -> list[Float64]:
    """N arrays [P]: step credits spread over their tokens, + one outcome per sibling on all trained tokens."""
    rows = []
    for sibling, (steps, loss_mask) in enumerate(zip(group.required("steps"), group.masks(), strict=True)):
        tokens = spread(credit(sibling, steps), ends=steps.ends, num_positions=len(loss_mask))
        rows.append(np.where(loss_mask, tokens + (0.0 if outcome is None else outcome[sibling]), 0.0))
    return rows


def _normalised_by_label(values: list[Float64], labels: list[Int64], *, eps: float, ddof: int, divide: bool = True) -> list[Float64]:
    """Centre, and divide by std + eps, among all values of one label, whichever sibling they are of."""
    sizes = np.cumsum([len(part) for part in values])[:-1]
    flat = np.concatenate(values) if values else np.zeros(0)
    tags = np.concatenate(labels) if labels else np.zeros(0)
    result = np.zeros_like(flat)
    for tag in np.unique(tags):
        inside = tags == tag
        result[inside] = normalised(flat[inside], eps=eps, ddof=ddof) if divide else centred(flat[inside])
    return np.split(result, sizes) if values else []
