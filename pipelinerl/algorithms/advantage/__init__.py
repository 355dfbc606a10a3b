"""The orchestrator's two calls: `group_advantages` when a group closes, `step_advantages` when a batch is cut.

The rules are the numpy functions of this package, each declared at its own place (`declare`). Where a rule reads what only the trainer has,
the trainer makes the same two calls over a whole step, and `value_returns` for its critic (`rules.makes_advantages_in_trainer`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np

from pipelinerl.algorithms.advantage.batch_rule import Credit
from pipelinerl.algorithms.advantage.outcome import Float64, ScoredGroup
from pipelinerl.algorithms.advantage.role_baseline import RoleBaselines
from pipelinerl.algorithms.declare import RuleSpec, load_rule
from pipelinerl.algorithms.method import Method, Option
from pipelinerl.algorithms.rules import spec_of
from pipelinerl.errors import ConfigError


def keeps_group(group: ScoredGroup, *, method: Method) -> bool:
    """Say whether the method's group filter lets this group train; it counts the rewards as they were scored, before shaping."""
    rule = method.group_filter
    return rule.name == "none" or spec_of("group_filter", rule.name).call(group, options=rule.options)


def group_advantages(group: ScoredGroup, *, method: Method, baselines: RoleBaselines | None = None) -> Credit:
    """Advantages of one group, [N], or N arrays [P] for rules per token, after the method's reward shaping.

    Raises `ValueError` where the group lacks a column the rule reads, and where `baselines` is missing for rule "rae".
    """
    rule, shaped = method.advantage, _shaped(group, method)
    spec = spec_of("advantage", rule.name)
    if spec.is_own:
        return _own_advantages(shaped, spec=spec, options=rule.options)
    return spec.call(shaped, *([baselines] if "baselines" in spec.parameters else []), options=rule.options)


def value_returns(group: ScoredGroup, *, method: Method) -> list[Float64]:
    """N arrays [P]: what a critic's values of the group are trained towards, under an advantage rule that has values."""
    spec = spec_of("advantage", method.advantage.name)
    returns = load_rule(f"{spec.reference.rpartition(':')[0]}:{spec.returns}")
    return returns(_shaped(group, method), **method.advantage.options)


def step_advantages(credits: Sequence[Credit], groups: Sequence[ScoredGroup], *, method: Method) -> list[Credit]:
    """Apply the method's batch rule to the advantages of all groups of a step, in the order given."""
    rule = method.batch
    return list(credits) if rule.name == "none" else spec_of("batch", rule.name).call(credits, groups, options=rule.options)


def token_columns(credit: Credit, *, group: ScoredGroup) -> list[Float64]:
    """N arrays [P]: one advantage per position, 0 where the position does not train."""
    masks = group.masks()
    rows = credit if isinstance(credit, list) else [np.full(len(loss_mask), value) for value, loss_mask in zip(credit, masks, strict=True)]
    return [np.where(loss_mask, row, 0.0) for row, loss_mask in zip(rows, masks, strict=True)]


def _own_advantages(group: ScoredGroup, *, spec: RuleSpec, options: Mapping[str, Option]) -> Credit:
    """Call a user's function for a group and check what it returns. Raises `ConfigError`, with its cause where the function raises."""
    given = [group.masks() if parameter == "loss_mask" else group.required(parameter) for parameter in spec.parameters]
    try:
        credit = spec.call(*given, options=options)
    except Exception as error:  # a user's function may raise anything; it becomes a named error with its cause
        raise ConfigError(f"algorithm.advantage: {spec.name} raised {type(error).__name__}: {error}") from error
    num, sizes = len(group.rewards), [len(loss_mask) for loss_mask in group.masks()]
    rows = [np.asarray(row, np.float64) for row in credit] if isinstance(credit, list | tuple) else np.asarray(credit, np.float64)
    is_whole = isinstance(rows, np.ndarray) and rows.shape == (num,)
    if not is_whole and not (isinstance(rows, list) and [row.shape for row in rows] == [(size,) for size in sizes]):
        got = f"an array of shape {rows.shape}" if isinstance(rows, np.ndarray) else f"arrays of shapes {[row.shape for row in rows]}"
        raise ConfigError(
            f"algorithm.advantage: {spec.name} returned {got}, expected one number for each of {num} siblings, or for each"
            f" an array of one number per position, {sizes} of them"
        )
    if not all(np.isfinite(row).all() for row in rows):
        raise ConfigError(f"algorithm.advantage: {spec.name} returned an advantage that is not finite for rewards {group.rewards.tolist()}")
    return rows


def _shaped(group: ScoredGroup, method: Method) -> ScoredGroup:
    return reduce(lambda held, rule: spec_of("shaping", rule.name).call(held, options=rule.options), method.shaping, group)
