"""Rejections: which trained tokens, or whole sequences, do not train after all. They change numerators, never denominators.

Every mask is `(terms, **options) -> [T] bool`, true where the token is kept; several are multiplied. Bounds are inclusive. A bound on k1
is stated and tested as a bound on rho itself (token) or on the geometric mean of rho (sequence): k1 = -log rho would reverse low and
high, which matters wherever low is not 1/high.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipelinerl.algorithms.loss.columns import LOG_LIMIT, Segments, Terms
from pipelinerl.algorithms.loss.kl import k3
from pipelinerl.algorithms.loss.own import call_own
from pipelinerl.algorithms.loss.probability import binary_kl
from pipelinerl.algorithms.loss.step_statistics import second_moments
from pipelinerl.algorithms.method import Rule
from pipelinerl.algorithms.own import is_own


def keep_mask(terms: Terms, *, rule: Rule) -> Tensor:
    """[T] bool, true where the rule lets the token train; meaningless where the token does not train anyway."""
    return call_own(rule, terms, column="masks") if is_own(rule.name) else _MASKS[rule.name](terms, **rule.options)


def _outlier_band(terms: Terms, *, low: float, high: float) -> Tensor:
    return _inside(terms.rho, low=low, high=high)


def _probability_band(terms: Terms, *, high: float) -> Tensor:
    return (_anchor(terms).exp() - terms.behaviour.exp()).abs() <= high


def _kpop(terms: Terms, *, high: float) -> Tensor:
    anchor = _anchor(terms)
    return torch.maximum(binary_kl(anchor, terms.behaviour), binary_kl(terms.behaviour, anchor)) <= high


def _geo_rs(terms: Terms, *, low: float, high: float) -> Tensor:
    return _reject_sequence(terms, metric="k1", over="mean", low=low, high=high)


def _k3_rs(terms: Terms, *, high: float) -> Tensor:
    return _reject_sequence(terms, metric="k3", over="mean", low=0.0, high=high)


def _product_band(terms: Terms, *, low: float, high: float) -> Tensor:
    return _reject_sequence(terms, metric="k1", over="sum", low=low, high=high)


def _veto(terms: Terms, *, low: float) -> Tensor:
    return _by_sequence(terms, terms.sequences.maximum(-terms.rho) <= -low)


def _reject_token(terms: Terms, *, metric: str, low: float, high: float) -> Tensor:
    return _inside(terms.rho if metric == "k1" else _metric(terms, metric), low=low, high=high)


def _reject_sequence(terms: Terms, *, metric: str, over: str, low: float, high: float) -> Tensor:
    values = terms.log_rho if metric == "k1" else _metric(terms, metric)
    pooled = _pool(terms.sequences, values, over=over)
    return _by_sequence(terms, _inside(pooled.clamp(-LOG_LIMIT, LOG_LIMIT).exp() if metric == "k1" else pooled, low=low, high=high))


def _opsm(terms: Terms, *, delta: float) -> Tensor:
    drift = terms.sequences.mean(-terms.log_ratio.detach())
    bad = terms.sequences.mean(terms.advantages) < 0
    return _by_sequence(terms, ~(bad & (drift > delta)))


def _vaco_tv(terms: Terms, *, delta: float) -> Tensor:
    drifted = terms.sequences.mean((terms.rho - 1).abs()) > delta
    return ~(terms.sequences.spread(drifted) & (terms.log_rho * terms.advantages > 0))


def _m2po(terms: Terms, *, tau: float) -> Tensor:
    return second_moments(terms.columns) <= terms.known.m2po_threshold


def _top_entropy(terms: Terms, *, fraction: float) -> Tensor:
    return terms.column("entropy").detach().float() >= terms.known.entropy_threshold


def _tv_gate(terms: Terms, *, high: float) -> Tensor:
    return _by_sequence(terms, terms.sequences.mean((terms.rho - 1).abs()) / 2 <= high)


def _overlong(terms: Terms) -> Tensor:
    return _by_sequence(terms, ~terms.columns.required("truncated"))


def _version_withhold(terms: Terms, *, bound: int) -> Tensor:
    return terms.columns.trained_version - terms.columns.versions <= bound


def _partial_rollout(terms: Terms) -> Tensor:
    versions = terms.columns.versions.to(terms.logprobs.dtype)
    return versions >= terms.sequences.spread(terms.sequences.maximum(versions))


_MASKS: dict[str, Callable[..., Tensor]] = {
    "outlier_band": _outlier_band,
    "ratio_band": _outlier_band,
    "probability_band": _probability_band,
    "kpop": _kpop,
    "geo_rs": _geo_rs,
    "k3_rs": _k3_rs,
    "product_band": _product_band,
    "veto": _veto,
    "reject_token": _reject_token,
    "reject_sequence": _reject_sequence,
    "opsm": _opsm,
    "vaco_tv": _vaco_tv,
    "m2po": _m2po,
    "top_entropy": _top_entropy,
    "tv_gate": _tv_gate,
    "overlong": _overlong,
    "version_withhold": _version_withhold,
    "partial_rollout": _partial_rollout,
}


def _anchor(terms: Terms) -> Tensor:
    """[T] log of the policy that rho compares with mu."""
    return terms.behaviour + terms.log_rho


def _inside(values: Tensor, *, low: float, high: float) -> Tensor:
    return (values >= low) & (values <= high)


def _by_sequence(terms: Terms, keep: Tensor) -> Tensor:
    return terms.sequences.spread(keep)


def _metric(terms: Terms, metric: str) -> Tensor:
    """[T] k3 and the binary KL are never negative; where rounding says so, a lower bound of 0 would drop tokens that agree."""
    match metric:
        case "ratio":
            return terms.rho
        case "k2":
            return terms.log_rho.square() / 2
        case "k3":
            return k3(terms.log_rho).clamp(min=0)
        case _:
            return binary_kl(terms.behaviour, _anchor(terms)).clamp(min=0)


def _pool(sequences: Segments, values: Tensor, *, over: str) -> Tensor:
    return {"mean": sequences.mean, "sum": sequences.sum, "max": sequences.maximum}[over](values)
