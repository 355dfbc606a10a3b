"""Calls the function of a loss, term, weight or mask, and checks what comes back from one of the user's, see `algorithms.own`.

`T` tokens of the row, `N` sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipelinerl.algorithms.declare import load_rule
from pipelinerl.algorithms.loss.columns import Terms
from pipelinerl.algorithms.method import Method, Rule
from pipelinerl.algorithms.rules import spec_of, specs_of
from pipelinerl.errors import ConfigError


def call_rule(rule: Rule, terms: Terms, *, column: str) -> Any:
    """Call the function of a rule: [T] float, or bool for a mask; a `Loss` for an objective of ours.

    A function of the user's gets what its parameters name, and is not shown a row without a token. Raises `ConfigError` where it gives
    another shape or dtype, and, with its cause, where it raises.
    """
    spec = spec_of(column, rule.name)
    if not spec.is_own:
        return spec.call(terms, options=rule.options)
    load_rule(spec.reference)
    if not len(terms.loss_mask):
        return terms.loss_mask if column == "masks" else terms.logprobs
    takes_gradient = column in ("objective", "auxiliary")
    given = [_carried(terms, parameter) for parameter in spec.parameters]
    if not takes_gradient:
        given = [value.detach() if isinstance(value, Tensor) else value for value in given]
    try:
        with torch.set_grad_enabled(takes_gradient and torch.is_grad_enabled()):
            values = spec.call(*given, options=rule.options)
    except Exception as error:  # a user's function may raise anything; it becomes a named error with its cause
        raise ConfigError(f"algorithm.{column}: {rule.name} raised {type(error).__name__}: {error}") from error
    return _checked(values, rule, terms, column=column)


def check_own_rules(method: Method) -> None:
    """Load every function of the user's that the trainer calls, so that what cannot be imported is known before the first row."""
    for column, _, spec in specs_of(method):
        if spec.is_own and column != "advantage":
            load_rule(spec.reference)


def _carried(terms: Terms, name: str) -> object:
    columns = terms.columns
    match name:
        case "logprobs" | "advantages" | "ratio" | "rho" | "sequences":
            return getattr(terms, name)
        case "behaviour_logprobs":
            return terms.behaviour
        case "proximal_logprobs":
            return terms.proximal
        case "staleness":
            return torch.where(terms.loss_mask, columns.trained_version - columns.versions, 0)
        case "correct" | "truncated":
            return terms.sequences.spread(columns.required(name))
        case _:
            return terms.column(name)


def _checked(values: object, rule: Rule, terms: Terms, *, column: str) -> Tensor:
    shape = tuple(terms.logprobs.shape)
    kind = "a bool tensor, true where the token trains" if column == "masks" else "a float tensor"
    if not isinstance(values, Tensor):
        raise ConfigError(f"algorithm.{column}: {rule.name} returned {type(values).__name__}, expected {kind} of shape {shape}")
    is_kind = values.dtype == torch.bool if column == "masks" else values.dtype.is_floating_point
    if tuple(values.shape) != shape or not is_kind:
        got = f"{str(values.dtype).removeprefix('torch.')} of shape {tuple(values.shape)}"
        raise ConfigError(f"algorithm.{column}: {rule.name} returned {got}, expected {kind} of shape {shape}, one number per token")
    return values
