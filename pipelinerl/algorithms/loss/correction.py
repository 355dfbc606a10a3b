"""The three-policy form: which policy the ratio is measured against, and the importance weight from rho = prox / mu.

Weights are detached and formed over trained tokens only. With proximal "engine" prox is mu, the ratio carries the whole correction, and
`resolve` refuses a weight; masks then see rho = sg[pi] / mu.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipelinerl.algorithms.loss.columns import (
    LOG_LIMIT,
    Segments,
    StepStatistics,
    Terms,
    TokenColumns,
    log_difference,
    masked,
    runs_of,
    sequences_of,
)
from pipelinerl.algorithms.loss.own import call_own
from pipelinerl.algorithms.method import Rule
from pipelinerl.algorithms.own import is_own


def terms_of(columns: TokenColumns, *, proximal: Rule, statistics: StepStatistics | None = None) -> Terms:
    """Mask, upcast and compare the row's log-probabilities against the proximal policy. Raises `ConfigError` for a missing column."""
    logprobs = masked(columns.logprobs, columns.trains)
    behaviour = masked(columns.behaviour_logprobs.detach(), columns.trains, like=logprobs)
    prox = _proximal_logprobs(columns, logprobs=logprobs.detach(), behaviour=behaviour, rule=proximal)
    anchor = logprobs.detach() if proximal.name == "engine" else prox
    return Terms(
        columns=columns,
        logprobs=logprobs,
        behaviour=behaviour,
        proximal=prox,
        advantages=masked(columns.advantages.detach(), columns.trains, like=logprobs),
        trains=columns.trains,
        log_ratio=log_difference(logprobs, prox),
        log_rho=log_difference(anchor, behaviour),
        sequences=sequences_of(columns),
        statistics=statistics,
    )


def loglinear_logprobs(current: Tensor, *, behaviour: Tensor, versions: Tensor, prox_version: int, current_version: int) -> Tensor:
    """[T] log mu + a (log pi - log mu), a = (v_prox - v_behave) / (v_theta - v_behave) per token, within 0..1 (AReaL).

    A token sampled by the policy being trained has no interval to interpolate in; there prox is mu, and so it is for a token newer than
    v_prox.
    """
    span = (current_version - versions).to(current.dtype)
    done = (prox_version - versions).to(current.dtype)
    fraction = torch.where(span > 0, done / span.clamp(min=1), torch.zeros_like(span)).clamp(0, 1)
    return behaviour + fraction * (current - behaviour)


def importance_weights(terms: Terms, *, rule: Rule) -> Tensor:
    """[T] detached weight of each token; 0 where a masking weight (MIS, IcePop) rejects it. Nothing is divided by a batch's mean."""
    options = {name: value for name, value in rule.options.items() if name != "batch_normalize"}
    return call_own(rule, terms, column="weight") if is_own(rule.name) else _WEIGHTS[rule.name](terms, **options)


def is_normalized(rule: Rule) -> bool:
    """Whether weights are divided by their mean over the step."""
    return not is_own(rule.name) and bool(rule.options.get("batch_normalize"))


def _proximal_logprobs(columns: TokenColumns, *, logprobs: Tensor, behaviour: Tensor, rule: Rule) -> Tensor:
    match rule.name:
        case "current":
            return logprobs
        case "engine":
            return behaviour
        case "recomputed":
            return masked(columns.required("old_logprobs").detach(), columns.trains, like=logprobs)
        case _:
            current = columns.trained_version
            versions = torch.where(columns.trains, columns.versions, current)
            lag = int(rule.options["prox_lag"] or 0)
            prox = current - lag
            return loglinear_logprobs(logprobs, behaviour=behaviour, versions=versions, prox_version=prox, current_version=current)


def _none(terms: Terms) -> Tensor:
    return torch.ones_like(terms.log_rho)


def _tis_token(terms: Terms, *, cap: float, floor: float) -> Tensor:
    return terms.rho.clamp(floor, cap)


def _tis_sequence(terms: Terms, *, cap: float, floor: float) -> Tensor:
    return _product(terms).clamp(floor, cap)


def _tis_geometric(terms: Terms, *, cap: float, floor: float) -> Tensor:
    return _geometric(terms, terms.sequences).clamp(floor, cap)


def _tis_segment(terms: Terms, *, cap: float) -> Tensor:
    return _geometric(terms, runs_of(terms.columns).restricted(terms.sequences.trains)).clamp(max=cap)


def _mis_token(terms: Terms, *, cap: float) -> Tensor:
    return torch.where(terms.rho <= cap, terms.rho, 0)


def _mis_sequence(terms: Terms, *, cap: float) -> Tensor:
    product = _product(terms)
    return torch.where(product <= cap, product, 0)


def _icepop(terms: Terms, *, low: float, high: float) -> Tensor:
    return torch.where((terms.rho >= low) & (terms.rho <= high), terms.rho, 0)


_WEIGHTS: dict[str, Callable[..., Tensor]] = {
    "none": _none,
    "tis_token": _tis_token,
    "tis_sequence": _tis_sequence,
    "tis_geometric": _tis_geometric,
    "tis_segment": _tis_segment,
    "mis_token": _mis_token,
    "mis_sequence": _mis_sequence,
    "icepop": _icepop,
}


def _product(terms: Terms) -> Tensor:
    log_product = terms.sequences.sum(terms.log_rho).clamp(-LOG_LIMIT, LOG_LIMIT)
    return terms.sequences.spread(log_product.exp())


def _geometric(terms: Terms, parts: Segments) -> Tensor:
    return parts.spread(parts.mean(terms.log_rho).exp())
