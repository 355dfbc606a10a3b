"""The loss of one packed row: objective, correction, masks, KL, auxiliary terms, aggregated into one raw sum.

    sum_i weight_i / unit_i * sum_t [ w_t keep_t objective_t + beta kl_t + auxiliary_t ]

The sum is never divided here. It adds up over rows, micro-batches and ranks, so the trainer divides once per step by `denominator(...)` of
the global counts before any rejection; a gradient accumulated from raw sums is scaled by the same number. How sequences are split
into rows, in which order, and over how many ranks then cannot matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipelinerl.algorithms.loss.auxiliary import faded
from pipelinerl.algorithms.loss.call import call_rule
from pipelinerl.algorithms.loss.columns import StepStatistics, Terms, TokenColumns
from pipelinerl.algorithms.loss.correction import importance_weights, is_normalized, terms_of
from pipelinerl.algorithms.loss.meters import Meters, finish_meters, measure, merge_meters, reduces_by_maximum
from pipelinerl.algorithms.loss.objective import objective_loss
from pipelinerl.algorithms.loss.step_statistics import measure_step
from pipelinerl.algorithms.method import Aggregation, Method, Rule

__all__ = [
    "LossSums",
    "StepStatistics",
    "TokenColumns",
    "denominator",
    "finish_meters",
    "measure_step",
    "merge_meters",
    "policy_loss",
    "reduces_by_maximum",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossSums:
    """The contribution of one row to a step."""

    loss: Tensor
    """Scalar with gradient: raw sum in the aggregation's unit."""
    meters: Meters
    """0-dimensional tensors; see `meters` for how they combine."""


def policy_loss(columns: TokenColumns, *, method: Method, statistics: StepStatistics | None = None) -> LossSums:
    """The raw loss sum and the meters of one row. A row without a trained token gives exactly 0, with a gradient of 0.

    `statistics` is what `measure_step` gave for the step; needed only by methods with `Need.WHOLE_STEP`. Raises `ConfigError` where
    a column the method reads is missing.
    """
    terms = terms_of(columns, proximal=method.proximal, statistics=statistics)
    keeps = _keeps(terms, method=method)
    weights = _ordered_weights(terms, keeps=keeps, method=method)
    objective = objective_loss(terms, rule=method.objective)
    factor = _factor(terms, aggregation=method.aggregation)
    parts = {"objective": _product(weights, *keeps.values()) * objective.values}
    penalties = None if method.kl.name == "none" else call_rule(method.kl, terms, column="kl")
    if penalties is not None:
        parts["kl"] = _beta(method.kl, step=columns.trained_version) * penalties
    parts |= {rule.name: call_rule(rule, terms, column="auxiliary") for rule in method.auxiliary}
    sums = {name: torch.where(columns.loss_mask, factor * values, 0).sum() for name, values in parts.items()}
    with torch.no_grad():
        meters = measure(terms, weights=weights, clipped=objective.clipped, keeps=keeps)
        if penalties is not None:
            meters["kl_penalty_sum"] = terms.sequences.mean(penalties.detach()).sum()
    meters |= {f"loss_{name}_total": value.detach() for name, value in sums.items()}
    return LossSums(loss=torch.stack(list(sums.values())).sum(), meters=meters)


def denominator(aggregation: Aggregation | str, *, num_tokens: int, num_sequences: int, max_tokens: int) -> float:
    """Give the divisor of a step's raw sums. Counts are global and before rejection; killed and withheld rows are in them.

    `max_tokens` is the constant length of Dr.GRPO. A step without a token divides by 1: its sums are 0.
    """
    match Aggregation(aggregation):
        case Aggregation.TOKEN_MEAN:
            count = num_tokens
        case Aggregation.TOKEN_SUM:
            count = 1
        case Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
            count = num_sequences * max_tokens
        case Aggregation.SEQ_MEAN_TOKEN_SUM | Aggregation.SEQ_MEAN_TOKEN_MEAN:
            count = num_sequences
    return float(max(count, 1))


def _keeps(terms: Terms, *, method: Method) -> dict[str, Tensor]:
    """[T] bool of every mask, under its name; a rule chained twice is numbered, so that neither hides the other."""
    names = [rule.name for rule in method.masks]
    labels = [name if names.count(name) == 1 else f"{name}_{index}" for index, name in enumerate(names)]
    return {label: call_rule(rule, terms, column="masks") for label, rule in zip(labels, method.masks, strict=True)}


def _ordered_weights(terms: Terms, *, keeps: dict[str, Tensor], method: Method) -> Tensor:
    """[T] importance weights, formed over the kept tokens only where the method masks before it weighs."""
    if is_normalized(method.weight):  # never before masks: `validation` sees to it
        return importance_weights(terms, rule=method.weight) / terms.known.mean_weight
    if method.mask_order != "before_weight" or not keeps:
        return importance_weights(terms, rule=method.weight)
    kept = _product(torch.ones_like(terms.logprobs), *keeps.values()) > 0
    return importance_weights(terms.restricted(kept), rule=method.weight)


def _factor(terms: Terms, *, aggregation: Aggregation) -> Tensor:
    """[T] sample weight of the token's sequence, over its token count where the unit is the mean of a sequence."""
    columns = terms.columns
    ones = torch.ones_like(terms.logprobs.detach())
    per_sequence = terms.sequences.mean(ones) if columns.weights is None else columns.weights.to(ones.dtype)
    if aggregation is Aggregation.SEQ_MEAN_TOKEN_MEAN:
        per_sequence = per_sequence / terms.sequences.sizes(ones.dtype)
    return terms.sequences.spread(per_sequence)


def _product(first: Tensor, *keeps: Tensor) -> Tensor:
    for keep in keeps:
        first = first * keep
    return first


def _beta(rule: Rule, *, step: int) -> float:
    start, final, steps = (float(rule.options[option] or 0.0) for option in ("beta", "final", "fade_steps"))
    return faded(start, final=final, fade_steps=steps, step=step)
