"""The orchestrator's two calls: `group_advantages` when a group closes, `step_advantages` when a batch is cut.

Names of the method table meet their numpy functions here. Where a rule reads what only the trainer has, the trainer makes the same two
calls over a whole step, and `value_returns` for its critic (`rules.makes_advantages_in_trainer`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from pipelinerl.algorithms.credit import (
    advantage,
    batch_rule,
    optimal_baseline,
    prime,
    roulette,
    selection,
    shaping,
    step_credit,
    token_advantage,
    value_advantage,
)
from pipelinerl.algorithms.credit.advantage import Float64, ScoredGroup
from pipelinerl.algorithms.credit.batch_rule import Credit
from pipelinerl.algorithms.credit.role_baseline import RoleBaselines
from pipelinerl.algorithms.method import Method, Rule
from pipelinerl.algorithms.own import is_own, load_own, signature_of
from pipelinerl.errors import ConfigError

_ADVANTAGE: dict[str, Callable[..., Credit]] = {
    "none": advantage.zero,
    "grpo": advantage.grpo,
    "dr_grpo": advantage.dr_grpo,
    "rloo": advantage.rloo,
    "rloo_doubly_robust": roulette.rloo_doubly_robust,
    "remax": advantage.remax,
    "opo": advantage.opo,
    "gdpo": advantage.gdpo,
    "passk": advantage.passk,
    "maxrl": advantage.maxrl,
    "reinforce_pp": token_advantage.reinforce_pp,
    "step_difference": step_credit.step_difference,
    "step_min": step_credit.step_min,
    "step_grpo": step_credit.step_grpo,
    "step_reinforce": step_credit.step_reinforce,
    "gigpo": step_credit.gigpo,
    "gae": value_advantage.gae,
    "vapo_gae": value_advantage.vapo_gae,
    "turn_gae": value_advantage.turn_gae,
    "otb": optimal_baseline.otb,
    "prime": prime.prime,
}

_BATCH: dict[str, Callable[..., list[Credit]]] = {
    "whiten_tokens": batch_rule.whiten_tokens,
    "whiten_sequences": batch_rule.whiten_sequences,
    "std_of_rewards": batch_rule.std_of_rewards,
    "gpg_alpha": batch_rule.gpg_alpha,
}

_SHAPING: dict[str, Callable[..., ScoredGroup]] = {
    "overlong_penalty": shaping.overlong_penalty,
    "minus_token_kl": shaping.minus_token_kl,
}

_FILTER: dict[str, Callable[..., bool]] = {"zero_variance": selection.has_spread, "accuracy_band": selection.within_accuracy}


def keeps_group(group: ScoredGroup, *, method: Method) -> bool:
    """Whether the method's group filter lets this group train; counts the rewards as they were scored, before shaping."""
    rule = method.group_filter
    options = {name: value for name, value in rule.options.items() if name != "refill"}  # the budget is the cut's
    return rule.name == "none" or _FILTER[rule.name](group, **options)


def group_advantages(group: ScoredGroup, *, method: Method, baselines: RoleBaselines | None = None) -> Credit:
    """Advantages of one group, [N], or N arrays [P] for rules per token, after the method's reward shaping.

    Raises `ValueError` where the group lacks a column the rule reads, and where `baselines` is missing for rule "rae".
    """
    rule = method.advantage
    options: dict[str, Any] = dict(rule.options)
    shaped = _shaped(group, method)
    if rule.name == "rae":
        if baselines is None:
            raise ValueError("advantage rae: got no baselines; keep one RoleBaselines per run, snapshot it, and pass it")
        return baselines.advantages(shaped)
    if is_own(rule.name):
        return _own_advantages(shaped, rule=rule)
    if rule.name not in _ADVANTAGE:
        raise ValueError(f"advantage {rule.name} reads what nothing here supplies; `resolve` refuses it")
    return _ADVANTAGE[rule.name](shaped, **options)


def value_returns(group: ScoredGroup, *, method: Method) -> list[Float64]:
    """N arrays [P]: what a critic's values of the group are trained towards, under an advantage rule that has values."""
    return value_advantage.RETURNS[method.advantage.name](_shaped(group, method), **method.advantage.options)


def step_advantages(credits: Sequence[Credit], groups: Sequence[ScoredGroup], *, method: Method) -> list[Credit]:
    """Apply the method's batch rule to the advantages of all groups of a step, in the order given."""
    rule = method.batch
    return list(credits) if rule.name == "none" else _BATCH[rule.name](credits, groups, **rule.options)


def token_columns(credit: Credit, *, group: ScoredGroup) -> list[Float64]:
    """N arrays [P]: one advantage per position, 0 where the position does not train."""
    masks = group.masks()
    rows = credit if isinstance(credit, list) else [np.full(len(trains), value) for value, trains in zip(credit, masks, strict=True)]
    return [np.where(trains, row, 0.0) for row, trains in zip(rows, masks, strict=True)]


def _own_advantages(group: ScoredGroup, *, rule: Rule) -> Credit:
    """What a user's function gives for a group, checked. Raises `ConfigError`, with its cause where the function raises."""
    parameters, _, _ = signature_of(rule.name)
    given = [group.masks() if parameter == "trains" else group.required(parameter) for parameter in parameters]
    try:
        credit = load_own(rule.name)(*given, **rule.options)
    except Exception as error:  # a user's function may raise anything; it becomes a named error with its cause
        raise ConfigError(f"algorithm.advantage: {rule.name} raised {type(error).__name__}: {error}") from error
    num, sizes = len(group.rewards), [len(trains) for trains in group.masks()]
    rows = [np.asarray(row, np.float64) for row in credit] if isinstance(credit, list | tuple) else np.asarray(credit, np.float64)
    is_whole = isinstance(rows, np.ndarray) and rows.shape == (num,)
    if not is_whole and not (isinstance(rows, list) and [row.shape for row in rows] == [(size,) for size in sizes]):
        got = f"an array of shape {rows.shape}" if isinstance(rows, np.ndarray) else f"arrays of shapes {[row.shape for row in rows]}"
        raise ConfigError(
            f"algorithm.advantage: {rule.name} returned {got}, expected one number for each of {num} siblings, or for each"
            f" an array of one number per position, {sizes} of them"
        )
    if not all(np.isfinite(row).all() for row in rows):
        raise ConfigError(f"algorithm.advantage: {rule.name} returned an advantage that is not finite for rewards {group.rewards.tolist()}")
    return rows


def _shaped(group: ScoredGroup, method: Method) -> ScoredGroup:
    return reduce(lambda held, step: _SHAPING[step.name](held, **step.options), method.shaping, group)
