"""All rules by column: look one up, fill in its options, derive what a method needs.

`spec_of` is the one place where a rule's name is looked up: among those declared here (`declare`), or, for `path:name`, in a file of the
user's (`own`).

An override of a column is a rule's name ("rloo"), or a table of options ({"cap": 4}), which changes options of the rule the row
already has, or both ({"name": "icepop", "high": 4}). Columns that hold several rules take a list of these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pipelinerl.algorithms.declare import RuleSpec, declared_in
from pipelinerl.algorithms.method import MASK_ORDERS, RULE_COLUMNS, TUPLE_COLUMNS, Aggregation, Method, Need, Option, Rule
from pipelinerl.algorithms.own import is_own, spec_of_own
from pipelinerl.errors import ConfigError
from pipelinerl.runtime.plugin import nearest

_MODULES = {
    "advantage": "shaping group_filter outcome early_stop role_baseline token_advantage step_scores graph value_advantage"
    " optimal_baseline prime batch_rule",
    "loss": "objective correction mask kl auxiliary critic",
}
"""The modules that declare rules: those of the orchestrator, with numpy, and those of the trainer, with torch."""

_NOTHING = {
    "group_filter": "every group trains",
    "batch": "advantages as they are",
    "weight": "1",
    "kl": "0",
    "critic": "no second model",
}
"""The meaning of the rule "none", which has no function, by column."""


_specs = [RuleSpec(column=column, name="none", formula=formula) for column, formula in _NOTHING.items()]
_specs += [spec for folder, names in _MODULES.items() for name in names.split() for spec in declared_in(f"{folder}.{name}")]
COLUMNS: dict[str, dict[str, RuleSpec]] = {
    column.name: {spec.name: spec for spec in _specs if spec.column == column.name}
    for column in dataclasses.fields(Method)
    if column.name in (*RULE_COLUMNS, *TUPLE_COLUMNS)
}
"""Every rule by column and name, in the order in which they act."""

_WORDS = ("aggregation", "mask_order")

_PARTS_OF_ONE = ("clip_low", "floor", "gamma", "lam", "decay", "fraction", "mix", "ddof")
_FROM_ONE_ON = ("cap", "horizon", "refill", "max_tokens", "buffer_tokens")
_LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(_PARTS_OF_ONE, (0.0, 1.0)),
    **dict.fromkeys(_FROM_ONE_ON, (1.0, math.inf)),
}
"""Closed ranges by option name; options not listed must only be finite and not negative."""


def spec_of(column: str, name: str) -> RuleSpec:
    """Look up a column's rule. Raises `ConfigError` for a name that is in no table, with the nearest, and as `spec_of_own`."""
    if is_own(name):
        return spec_of_own(column, name)
    table = COLUMNS[column]
    if name not in table:
        raise ConfigError(f"algorithm.{column}: no rule named {name!r}{nearest(name, table)}. Rules: {', '.join(table)}.")
    return table[name]


class Chosen(NamedTuple):
    """A rule of a method; as text "objective clip"."""

    column: str
    rule: Rule
    spec: RuleSpec

    def __str__(self) -> str:
        return f"{self.column} {self.rule.name}"


def specs_of(method: Method) -> Iterator[Chosen]:
    """Every rule of a method with its column and its spec."""
    rules = [(column, getattr(method, column)) for column in RULE_COLUMNS]
    rules += [(column, rule) for column in TUPLE_COLUMNS for rule in getattr(method, column)]
    return (Chosen(column, rule, spec_of(column, rule.name)) for column, rule in rules)


def needs_of(method: Method) -> frozenset[Need]:
    """Everything the rules of a method read beyond what every run has."""
    needs: set[Need] = set()
    for _, rule, spec in specs_of(method):
        needs |= spec.needs_with(rule.options)
    if spec_of("advantage", method.advantage.name).on_trainer or Need.TOKEN_KL in needs:  # see `makes_advantages_in_trainer`
        needs = needs - {Need.WHOLE_BATCH} | {Need.WHOLE_STEP}
    return frozenset(needs)


def makes_advantages_in_trainer(method: Method) -> bool:
    """Say whether advantages, and the rule over the whole step after them, are made in the trainer: the orchestrator then sends zeros."""
    return spec_of("advantage", method.advantage.name).on_trainer or Need.TOKEN_KL in method.needs


def with_columns(method: Method, columns: Mapping[str, Any]) -> Method:
    """The method with some columns changed and `needs` derived anew. Raises `ConfigError` for an unknown column, rule or option."""
    known = (*COLUMNS, *_WORDS)
    values: dict[str, Any] = {}
    for column, override in columns.items():
        if column not in known:
            raise ConfigError(f"algorithm: {column!r} is no column of a method{nearest(column, known)}. Columns: {', '.join(known)}.")
        if column in TUPLE_COLUMNS:
            items = [override] if isinstance(override, str | Mapping) else list(override)
            values[column] = tuple(rule_from(column, item) for item in items)
            names = [rule.name for rule in values[column]]
            if column != "masks" and len(set(names)) < len(names):
                raise ConfigError(f"algorithm.{column}: got {', '.join(names)}, expected each rule at most once.")
        elif column in RULE_COLUMNS:
            values[column] = rule_from(column, override, current=getattr(method, column))
        else:
            values[column] = _word(column, override)
    changed = dataclasses.replace(method, **values)
    return dataclasses.replace(changed, needs=needs_of(changed))


def rule_from(column: str, override: Any, *, current: Rule | None = None) -> Rule:
    """Build a rule of a column from its override; `current` gives the rule whose options a table without a name changes."""
    options = {"name": override} if isinstance(override, str) else dict(override) if isinstance(override, Mapping) else None
    if options is None:
        raise ConfigError(f"algorithm.{column}: got {override!r}, expected a rule's name or a table of options.")
    name = options.pop("name", current.name if current else None)
    spec = spec_of(column, str(name))
    filled: dict[str, Option] = dict(spec.options)
    if current is not None and current.name == name:
        filled |= current.options
    for option, value in options.items():
        if option not in spec.options:
            has = ", ".join(spec.options) or "none"
            raise ConfigError(f"algorithm.{column}: {name} has no option {option!r}{nearest(option, spec.options)}. Options: {has}.")
        filled[option] = _checked(f"algorithm.{column}.{option}", option, value, spec)
    return Rule(name=str(name), options=filled)


def _word(column: str, override: Any) -> str:
    allowed = [mode.value for mode in Aggregation] if column == "aggregation" else list(MASK_ORDERS)
    if override not in allowed:
        raise ConfigError(f"algorithm.{column}: got {override!r}{nearest(str(override), allowed)}. Expected one of {', '.join(allowed)}.")
    return Aggregation(override) if column == "aggregation" else override


def _checked(path: str, option: str, value: Any, spec: RuleSpec) -> Option:
    default = spec.options[option]
    if option in spec.choices:
        if value not in spec.choices[option]:
            raise ConfigError(f"{path}: got {value!r}, expected one of {', '.join(map(str, spec.choices[option]))}.")
        return value
    if isinstance(default, bool) or isinstance(value, bool):
        if isinstance(default, bool) and isinstance(value, bool):
            return value
        raise ConfigError(f"{path}: got {value!r}, expected {'true or false' if isinstance(default, bool) else 'a number'}.")
    if spec.is_own and isinstance(default, str) and isinstance(value, str):
        return value
    if not isinstance(value, int | float):
        raise ConfigError(f"{path}: got {value!r}, expected {'a text' if isinstance(default, str) else 'a number'}.")
    low, high = (-math.inf, math.inf) if spec.is_own else _LIMITS.get(option, (0.0, math.inf))
    if not math.isfinite(value) or not low <= value <= high:
        raise ConfigError(f"{path}: got {value!r}, expected a finite number from {low:g} to {high:g}.")
    if isinstance(default, int) and not isinstance(value, int):
        raise ConfigError(f"{path}: got {value!r}, expected a whole number.")
    return value if default is None or isinstance(default, int) else float(value)
