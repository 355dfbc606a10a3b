"""The three-policy form: which policy the ratio is measured against, and the importance weight from rho = prox / mu.

Weights are detached and formed over trained tokens only. With proximal "engine" prox is mu, the ratio carries the whole correction, and
`resolve` refuses a weight; masks then see rho = sg[pi] / mu.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipelinerl.algorithms.declare import proximal, weight
from pipelinerl.algorithms.loss.call import call_rule
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
from pipelinerl.algorithms.method import Need, Rule
from pipelinerl.algorithms.own import is_own
from pipelinerl.algorithms.rules import spec_of


def terms_of(columns: TokenColumns, *, proximal: Rule, statistics: StepStatistics | None = None) -> Terms:
    """Mask, upcast and compare the row's log-probabilities against the proximal policy. Raises `ConfigError` for a missing column."""
    logprobs = masked(columns.logprobs, columns.loss_mask)
    behaviour = masked(columns.behaviour_logprobs.detach(), columns.loss_mask, like=logprobs)
    prox = spec_of("proximal", proximal.name).call(columns, logprobs.detach(), behaviour, options=proximal.options)
    anchor = logprobs.detach() if proximal.name == "engine" else prox
    return Terms(
        columns=columns,
        logprobs=logprobs,
        behaviour=behaviour,
        proximal=prox,
        advantages=masked(columns.advantages.detach(), columns.loss_mask, like=logprobs),
        loss_mask=columns.loss_mask,
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
    return torch.ones_like(terms.log_rho) if rule.name == "none" else call_rule(rule, terms, column="weight")


def is_normalized(rule: Rule) -> bool:
    """Say whether weights are divided by their mean over the step."""
    return not is_own(rule.name) and bool(rule.options.get("batch_normalize"))


@proximal(source="this project")
def current(columns: TokenColumns, logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """sg[pi]: for objectives that clip nothing; weights and masks see pi / mu"""
    return logprobs


@proximal(source="verl; AReaL arXiv:2505.24298", needs={Need.OLD_LOGPROBS})
def recomputed(columns: TokenColumns, logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """the policy at the start of the step; with one pass over a step that is pi itself"""
    return masked(columns.required("old_logprobs").detach(), columns.loss_mask, like=logprobs)


@proximal(source="verl bypass mode; TRL AsyncGRPO; prime-rl")
def engine(columns: TokenColumns, logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """mu itself: the ratio is pi / mu and carries the whole correction (two policies; no importance weight)"""
    return behaviour


@proximal(source="AReaL prox_approx", needs={Need.TOKEN_VERSIONS})
def loglinear(columns: TokenColumns, logprobs: Tensor, behaviour: Tensor, *, prox_lag: int = 1) -> Tensor:
    """log mu + a (log pi - log mu), a = (v_prox - v_behave) / (v_theta - v_behave), v_prox = v_theta - prox_lag"""
    newest = columns.trained_version
    versions = torch.where(columns.loss_mask, columns.versions, newest)
    return loglinear_logprobs(logprobs, behaviour=behaviour, versions=versions, prox_version=newest - int(prox_lag), current_version=newest)


@weight(source="verl, slime (tis_clip_low), OAT")
def tis_token(terms: Terms, *, cap: float = 2.0, floor: float = 0.0) -> Tensor:
    """min(rho, cap), at least floor; with batch_normalize over its mean over the step (verl)

    With a floor, tokens that the policy has all but given up keep so much of their gradient.
    """
    return terms.rho.clamp(floor, cap)


@weight(source="SkyRL, verl", level="sequence")
def tis_sequence(terms: Terms, *, cap: float = 5.0, floor: float = 0.0) -> Tensor:
    """min(prod_t rho, cap), at least floor; with batch_normalize over its mean over the step (verl)"""
    return _product(terms).clamp(floor, cap)


@weight(source="ROLL", level="sequence")
def tis_geometric(terms: Terms, *, cap: float = 1.2, floor: float = 0.0) -> Tensor:
    """min(exp(mean_t log rho), cap), at least floor; with batch_normalize over its mean over the step (verl)"""
    return _geometric(terms, terms.sequences).clamp(floor, cap)


@weight(source="ROLL", level="sequence", caller_options={}, needs_if={})
def tis_segment(terms: Terms, *, cap: float = 1.2) -> Tensor:
    """min(exp(mean log rho over an unbroken run of trained tokens), cap)"""
    return _geometric(terms, runs_of(terms.columns).restricted(terms.sequences.loss_mask)).clamp(max=cap)


@weight(source="MIS; cap as TRL")
def mis_token(terms: Terms, *, cap: float = 3.0) -> Tensor:
    """rho where rho <= cap, else 0; with batch_normalize over its mean over the step (verl)"""
    return torch.where(terms.rho <= cap, terms.rho, 0)


@weight(source="MIS; cap as TRL", level="sequence")
def mis_sequence(terms: Terms, *, cap: float = 3.0) -> Tensor:
    """prod_t rho where <= cap, else 0; with batch_normalize over its mean over the step (verl)"""
    product = _product(terms)
    return torch.where(product <= cap, product, 0)


@weight(source="IcePop")
def icepop(terms: Terms, *, low: float = 0.5, high: float = 5.0) -> Tensor:
    """rho where low <= rho <= high, else 0; with batch_normalize over its mean over the step (verl)"""
    return torch.where((terms.rho >= low) & (terms.rho <= high), terms.rho, 0)


def _product(terms: Terms) -> Tensor:
    log_product = terms.sequences.sum(terms.log_rho).clamp(-LOG_LIMIT, LOG_LIMIT)
    return terms.sequences.spread(log_product.exp())


def _geometric(terms: Terms, parts: Segments) -> Tensor:
    return parts.spread(parts.mean(terms.log_rho).exp())
