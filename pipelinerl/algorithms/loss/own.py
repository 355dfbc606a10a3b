"""Calls a user's loss, term, weight or mask with what its parameters name, and checks what comes back. See `pipelinerl.algorithms.own`.

`T` tokens of the row, `N` sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipelinerl.algorithms.loss.columns import Terms
from pipelinerl.algorithms.method import Method, Rule
from pipelinerl.algorithms.own import is_own, load_own, signature_of
from pipelinerl.algorithms.rules import specs_of
from pipelinerl.errors import ConfigError


def call_own(rule: Rule, terms: Terms, *, column: str) -> Tensor:
    """[T] what the function gives: float, or bool for a mask. A row without a token is not shown to it.

    Raises `ConfigError` for another shape or dtype, and, with its cause, where the function raises.
    """
    function = load_own(rule.name)
    if not len(terms.trains):
        return terms.trains if column == "masks" else terms.logprobs
    parameters, _, _ = signature_of(rule.name)
    takes_gradient = column in ("objective", "auxiliary")
    given = [_carried(terms, parameter) for parameter in parameters]
    if not takes_gradient:
        given = [value.detach() if isinstance(value, Tensor) else value for value in given]
    try:
        with torch.set_grad_enabled(takes_gradient and torch.is_grad_enabled()):
            values = function(*given, **rule.options)
    except Exception as error:  # a user's function may raise anything; it becomes a named error with its cause
        raise ConfigError(f"algorithm.{column}: {rule.name} raised {type(error).__name__}: {error}") from error
    return _checked(values, rule, terms, column=column)


def check_own_rules(method: Method) -> None:
    """Load every function of the user's that the trainer calls, so that what cannot be imported is known before the first row."""
    for column, rule, _ in specs_of(method):
        if is_own(rule.name) and column != "advantage":
            load_own(rule.name)


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
            return torch.where(terms.trains, columns.trained_version - columns.versions, 0)
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
