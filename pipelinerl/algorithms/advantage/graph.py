"""Advantages of the turns of episodes that may branch: from a forest of turns with rewards to one number per turn.

The forest of a group is one `StepScores` per rollout: a step for each turn, with the turn that it continues (`parents`), the reward it
earned (`scores`) and the state it answered (`anchors`). An episode in one line is a chain, and every rule gives on it what is published for
chains. All tokens of a turn get its number; what was given to the model gets 0. A turn that several branches share is one turn: it trains
once.

Legend: `N` rollouts, `K` turns of one of them, r_k a turn's reward, R the reward of a rollout; a leaf is a turn that none continues.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import numpy as np

from pipelinerl.algorithms.advantage.outcome import Float64, Int64, Mask, ScoredGroup, StepScores, centred, normalised
from pipelinerl.algorithms.advantage.token_advantage import spread
from pipelinerl.algorithms.declare import advantage
from pipelinerl.algorithms.method import Need

# --- over one tree ---


def following_sum(values: Float64, *, parents: Int64 | None = None, gamma: float = 1.0) -> Float64:
    """[K] v + gamma * the mean of the same over the turns that continue it; on a chain sum_{j>=k} gamma^(j-k) v_j."""
    sums, below = np.zeros_like(values), _Below(len(values), parents)
    for k in reversed(range(len(values))):
        sums[k] = values[k] + gamma * below.mean(k)
        below.add(k, sums[k])
    return sums


def future_minimum(scores: Float64, *, parents: Int64 | None = None) -> Float64:
    """[K] smallest score from here to the end, the mean over branches (PURE, arXiv:2504.15275).

    Padding with easy steps cannot raise it, as it would a sum.
    """
    minima, below = np.zeros_like(scores), _Below(len(scores), parents)
    for k in reversed(range(len(scores))):
        minima[k] = below.mean(k) if below.counts[k] else scores[k]
        below.add(k, min(minima[k], scores[below.parents[k]]))
    return minima


def differences(scores: Float64, *, parents: Int64 | None = None) -> Float64:
    """[K] a score less the one before it, which is 0 before the first: a potential, so the credits of a path sum to its last score."""
    before = _parents_of(len(scores), parents)
    return scores - np.where(before < 0, 0.0, scores[before]) if len(scores) else scores


def path_sum(values: Float64, *, parents: Int64 | None = None) -> Float64:
    """[K] the sum from the first turn to this one."""
    sums = values.copy()
    for k, parent in enumerate(_parents_of(len(values), parents)):
        sums[k] += sums[parent] if parent >= 0 else 0.0
    return sums


def leaf_mean(values: Float64, *, parents: Int64 | None = None) -> Float64:
    """[K] mean over the leaves under each turn, itself where it is one, of their values."""
    before = _parents_of(len(values), parents)
    sums, counts = np.zeros_like(values), np.zeros(len(values))
    for k in reversed(range(len(values))):
        if not counts[k]:
            sums[k], counts[k] = values[k], 1
        if (parent := before[k]) >= 0:
            sums[parent], counts[parent] = sums[parent] + sums[k], counts[parent] + counts[k]
    return sums / counts if len(values) else sums


def leaves(num: int, *, parents: Int64 | None = None) -> Mask:
    """[K] true for turns that none continues."""
    return ~np.isin(np.arange(num), _parents_of(num, parents))


# --- rules ---


@advantage(
    source="GiGPO arXiv:2505.10978, constants as its code, whose default mode divides by no std: divide_by_std = false",
    needs={Need.ANCHORS},
    min_group=2,
)
def gigpo(
    group: ScoredGroup, *, weight: float = 1.0, gamma: float = 0.95, divide_by_std: bool = True, eps: float = 1e-6, ddof: int = 1
) -> list[Float64]:
    """(R - mean_g)/(std_g + eps) + weight * the same over R discounted by the turns to come, from equal anchor states

    A state that only one step left has no baseline and adds nothing. Where a turn branches, its return is the mean over its branches.
    """
    steps: tuple[StepScores, ...] = group.required("steps")
    returns = [following_sum(sibling.scores, parents=sibling.parents, gamma=gamma) for sibling in steps]
    inner = normalised_by_label(returns, _anchors(steps, rule="gigpo"), eps=eps, ddof=ddof, divide=divide_by_std)
    episode = _compared(group.rewards, eps=eps, ddof=ddof, divide=divide_by_std)
    return per_token(group, [weight * inner[sibling] + episode[sibling] for sibling in range(len(steps))], outside=episode)


@advantage(source="HGPO arXiv:2602.22817, constants as its code", needs={Need.ANCHORS}, min_group=2)
def hgpo(
    group: ScoredGroup,
    *,
    history: int = 2,
    alpha: float = 1.0,
    gamma: float = 0.95,
    divide_by_std: bool = False,
    eps: float = 1e-6,
    ddof: int = 0,
) -> list[Float64]:
    """sum_k w_k (G - mean)/(std + eps) among turns from equal states that have k equal states before them, w_k as (k + 1)^alpha

    G is the return discounted by the turns to come, k goes from 0 to `history`, and the weights of a turn sum to 1 over those k for which
    another turn is like it; without any it gets 0. std as for gigpo.
    """
    steps: tuple[StepScores, ...] = group.required("steps")
    returns = [following_sum(sibling.scores, parents=sibling.parents, gamma=gamma) for sibling in steps]
    anchors = _anchors(steps, rule="hgpo")
    total, weights = ([np.zeros(len(part)) for part in returns] for _ in range(2))
    for k in range(int(history) + 1):
        contexts = [_contexts(part, k, parents=sibling.parents) for part, sibling in zip(anchors, steps, strict=True)]
        labels, has_like = _numbered(contexts)
        inner = normalised_by_label(returns, labels, eps=eps, ddof=ddof, divide=divide_by_std)
        for sibling in range(len(steps)):
            weight = (k + 1.0) ** alpha * has_like[sibling]
            total[sibling] += weight * inner[sibling]
            weights[sibling] += weight
    return per_token(group, [part / np.where(weight > 0, weight, 1.0) for part, weight in zip(total, weights, strict=True)])


@advantage(source="Tree-GRPO arXiv:2509.21240, section 3", needs={Need.TURNS}, min_group=2)
def tree_grpo(group: ScoredGroup, *, divide_by_std: bool = True, eps: float = 1e-6, ddof: int = 1) -> list[Float64]:
    """mean over the leaves under a turn of (G - mean)/(std + eps) among the leaves of its rollout, + the same among those of all siblings

    G is what the path to a leaf earned. A published trajectory is a path here, and a turn that several share trains by their mean.
    """
    steps: tuple[StepScores, ...] = group.required("steps")
    compare = functools.partial(_compared, eps=eps, ddof=ddof, divide=divide_by_std)
    ends = [leaves(len(sibling.scores), parents=sibling.parents) for sibling in steps]
    earned = [path_sum(sibling.scores, parents=sibling.parents)[end] for sibling, end in zip(steps, ends, strict=True)]
    among_all = np.split(compare(np.concatenate(earned)), np.cumsum([len(part) for part in earned])[:-1])
    credits = []
    for sibling, end, own, everywhere in zip(steps, ends, earned, among_all, strict=True):
        values = np.zeros(len(end))
        values[end] = compare(own) + everywhere
        credits.append(leaf_mean(values, parents=sibling.parents))
    return per_token(group, credits)


@advantage(source="TreeRPO arXiv:2506.05183; hierarchical GRPO of prime-rl", needs={Need.TURNS}, min_group=2)
def tree_rpo(group: ScoredGroup, *, divide_by_std: bool = True, eps: float = 1e-6, ddof: int = 1) -> list[Float64]:
    """(V - mean)/(std + eps) among the turns that continue the same one, V the mean over leaves of what their paths earned

    A group in a group: first turns are compared over all siblings of the prompt, a proposal by the mean of those who solved it, and solvers
    with each other. A turn that is alone under its parent has its parent's advantage.
    """
    steps: tuple[StepScores, ...] = group.required("steps")
    compare = functools.partial(_compared, eps=eps, ddof=ddof, divide=divide_by_std)
    parents = [_parents_of(len(sibling.scores), sibling.parents) for sibling in steps]
    worth = [leaf_mean(path_sum(sibling.scores, parents=part), parents=part) for sibling, part in zip(steps, parents, strict=True)]
    firsts = [np.flatnonzero(part < 0) for part in parents]
    among_firsts = compare(np.concatenate([values[first] for values, first in zip(worth, firsts, strict=True)]))
    credits = []
    for values, part, first in zip(worth, parents, firsts, strict=True):
        own, among_firsts = among_firsts[: len(first)], among_firsts[len(first) :]
        credit = np.zeros(len(values))
        credit[first] = own
        for k in range(len(values)):  # parents before those that continue them
            following = np.flatnonzero(part == k)
            credit[following] = credit[k] if len(following) == 1 else compare(values[following])
        credits.append(credit)
    return per_token(group, credits)


@advantage(source="MT-GRPO arXiv:2505.11821", needs={Need.TURNS}, min_group=2)
def mt_grpo(group: ScoredGroup, *, outcome_coef: float = 1.0, eps: float = 1e-6, ddof: int = 1) -> list[Float64]:
    """(r - mean)/(std + eps) among turns of equal depth + outcome_coef (R - mean_g)/(std_g + eps); a leaf: (R - mean_g)/(std_g + eps)"""
    steps: tuple[StepScores, ...] = group.required("steps")
    outcome = normalised(group.rewards, eps=eps, ddof=ddof)
    depths = [path_sum(np.ones(len(sibling.scores)), parents=sibling.parents).astype(np.int64) for sibling in steps]
    ends = [leaves(len(sibling.scores), parents=sibling.parents) for sibling in steps]
    labels = [np.where(end, -1, depth) for depth, end in zip(depths, ends, strict=True)]
    turns = normalised_by_label([sibling.scores for sibling in steps], labels, eps=eps, ddof=ddof)
    credits = [np.where(end, own, turn + outcome_coef * own) for turn, end, own in zip(turns, ends, outcome, strict=True)]
    return per_token(group, credits)


# --- for rules over steps, here and in `step_scores` ---


def per_token(group: ScoredGroup, credits: Sequence[Float64], *, outside: Float64 | None = None) -> list[Float64]:
    """N arrays [P]: [K] credits spread over the tokens of their steps, and one number per sibling after its last step (0 by default)."""
    rows = []
    for sibling, (steps, loss_mask) in enumerate(zip(group.required("steps"), group.masks(), strict=True)):
        tokens = spread(credits[sibling], ends=steps.ends, num_positions=len(loss_mask))
        after = np.arange(len(loss_mask)) > (steps.ends[-1] if len(steps.ends) else -1)
        rows.append(np.where(loss_mask, np.where(after, 0.0 if outside is None else outside[sibling], tokens), 0.0))
    return rows


def normalised_by_label(values: list[Float64], labels: list[Int64], *, eps: float, ddof: int, divide: bool = True) -> list[Float64]:
    """Centre, and divide by std + eps, among all values of one label, whichever sibling they are of."""
    sizes = np.cumsum([len(part) for part in values])[:-1]
    flat = np.concatenate(values) if values else np.zeros(0)
    tags = np.concatenate(labels) if labels else np.zeros(0)
    result = np.zeros_like(flat)
    for tag in np.unique(tags):
        inside = tags == tag
        result[inside] = _compared(flat[inside], eps=eps, ddof=ddof, divide=divide)
    return np.split(result, sizes) if values else []


def _compared(values: Float64, *, eps: float, ddof: int, divide: bool) -> Float64:
    return normalised(values, eps=eps, ddof=ddof) if divide else centred(values)


class _Below:
    """Means over the turns that continue each, while a tree is walked from its leaves."""

    def __init__(self, num: int, parents: Int64 | None) -> None:
        self.parents = _parents_of(num, parents)
        self.counts = np.zeros(num, np.int64)
        self._sums = np.zeros(num)

    def add(self, turn: int, value: float) -> None:
        if (parent := self.parents[turn]) >= 0:
            self.counts[parent] += 1
            self._sums[parent] += value

    def mean(self, turn: int) -> float:
        return float(self._sums[turn] / self.counts[turn]) if self.counts[turn] else 0.0


def _parents_of(num: int, parents: Int64 | None) -> Int64:
    return np.arange(num) - 1 if parents is None else parents


def _anchors(steps: Sequence[StepScores], *, rule: str) -> list[Int64]:
    if any(sibling.anchors is None for sibling in steps):
        raise ValueError(f"{rule}: StepScores without anchors; the environment must name the state each step started from")
    return [np.asarray(sibling.anchors) for sibling in steps]


def _contexts(anchors: Int64, k: int, *, parents: Int64 | None) -> list[Hashable | None]:
    """[K] the state of each turn and the k before it; None where fewer are before it."""
    before = _parents_of(len(anchors), parents)
    found: list[Hashable | None] = [(anchor,) for anchor in anchors.tolist()]
    at = np.arange(len(anchors))
    for _ in range(k):
        at = np.where(at < 0, -1, before[at]) if len(at) else at
        found = [None if place < 0 or held is None else (held, int(anchors[place])) for place, held in zip(at.tolist(), found, strict=True)]
    return found


def _numbered(contexts: Sequence[Sequence[Hashable | None]]) -> tuple[list[Int64], list[Mask]]:
    """Return (a number for each context, equal for equal ones; whether another turn of the group has the same)."""
    numbers = {context: number for number, context in enumerate(dict.fromkeys(each for part in contexts for each in part))}
    labels = [np.array([numbers[each] for each in part], np.int64) for part in contexts]
    counts = np.bincount(np.concatenate([*labels, np.zeros(0, np.int64)]), minlength=len(numbers))
    if None in numbers:
        counts[numbers[None]] = 0
    return labels, [counts[part] > 1 for part in labels]
