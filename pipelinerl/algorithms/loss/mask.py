"""Rejections: which trained tokens, or whole sequences, do not train after all. They change numerators, never denominators.

Every mask is `(terms, **options) -> [T] bool`, true where the token is kept; several are multiplied. Bounds are inclusive. A bound on k1
is stated and tested as a bound on rho itself (token) or on the geometric mean of rho (sequence): k1 = -log rho would reverse low and
high, which matters wherever low is not 1/high.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pipelinerl.algorithms.declare import mask
from pipelinerl.algorithms.loss.columns import LOG_LIMIT, Segments, Terms
from pipelinerl.algorithms.loss.kl import estimate_k3
from pipelinerl.algorithms.loss.probability import binary_kl
from pipelinerl.algorithms.loss.step_statistics import second_moments
from pipelinerl.algorithms.method import Need


@mask(source="SkyRL")
def outlier_band(terms: Terms, *, low: float = 1e-4, high: float = 100.0) -> Tensor:
    """keep low <= rho <= high"""
    return _inside(terms.rho, low=low, high=high)


@mask(source="ROLL")
def ratio_band(terms: Terms, *, low: float = 0.8, high: float = 1.2) -> Tensor:
    """keep low <= rho <= high"""
    return _inside(terms.rho, low=low, high=high)


@mask(source="ROLL", idle_at_one={"high": "probability"})
def probability_band(terms: Terms, *, high: float = 0.2) -> Tensor:
    """keep |prox - mu| <= high"""
    return (_anchor(terms).exp() - terms.behaviour.exp()).abs() <= high


@mask(source="AReaL")
def kpop(terms: Terms, *, high: float = 2.0) -> Tensor:
    """keep max(binary KL(prox, mu), binary KL(mu, prox)) <= high"""
    anchor = _anchor(terms)
    return torch.maximum(binary_kl(anchor, terms.behaviour), binary_kl(terms.behaviour, anchor)) <= high


@mask(source="SkyRL; NeMo-RL 0.999, 1.002", level="sequence")
def geo_rs(terms: Terms, *, low: float = 0.99, high: float = 1.01) -> Tensor:
    """keep sequence while low <= exp(mean_t log rho) <= high"""
    return reject_sequence(terms, metric="k1", over="mean", low=low, high=high)


@mask(source="verl rollout correction, preset bypass_ppo_clip_k3_rs", level="sequence")
def k3_rs(terms: Terms, *, high: float = 0.01) -> Tensor:
    """keep sequence while mean_t(rho - 1 - log rho) <= high"""
    return reject_sequence(terms, metric="k3", over="mean", low=0.0, high=high)


@mask(source="SkyRL", level="sequence")
def product_band(terms: Terms, *, low: float = 0.5, high: float = 2.0) -> Tensor:
    """keep sequence while low <= prod_t rho <= high"""
    return reject_sequence(terms, metric="k1", over="sum", low=low, high=high)


@mask(source="verl before 0.9, whose option rollout_token_veto_threshold 0.9.1 has no more", level="sequence")
def veto(terms: Terms, *, low: float = 1e-4) -> Tensor:
    """drop sequence when any rho < low"""
    return terms.sequences.spread(terms.sequences.maximum(-terms.rho) <= -low)


@mask(source="verl rollout correction")
def reject_token(
    terms: Terms, *, metric: Literal["ratio", "k1", "k2", "k3", "binary_kl"] = "ratio", low: float = 0.0, high: float
) -> Tensor:
    """keep low <= metric(rho) <= high; k1 is tested as rho itself"""
    return _inside(terms.rho if metric == "k1" else _metric(terms, metric), low=low, high=high)


@mask(source="verl rollout correction", level="sequence")
def reject_sequence(
    terms: Terms,
    *,
    metric: Literal["ratio", "k1", "k2", "k3", "binary_kl"] = "k3",
    over: Literal["mean", "sum", "max"] = "mean",
    low: float = 0.0,
    high: float,
) -> Tensor:
    """keep sequence while low <= metric over its tokens <= high; k1 is tested as the geometric mean of rho"""
    values = terms.log_rho if metric == "k1" else _metric(terms, metric)
    pooled = _pool(terms.sequences, values, over=over)
    return terms.sequences.spread(_inside(pooled.clamp(-LOG_LIMIT, LOG_LIMIT).exp() if metric == "k1" else pooled, low=low, high=high))


@mask(
    source="DeepSeek-V3.2 arXiv:2512.02556; delta as slime and MILES",
    level="sequence",
    proximal={"engine", "recomputed", "loglinear"},
    reads_mu=False,
)
def opsm(terms: Terms, *, delta: float = 1e-4) -> Tensor:
    """drop sequence where A<0 and mean_t(log prox - log pi) > delta"""
    drift = terms.sequences.mean(-terms.log_ratio.detach())
    bad = terms.sequences.mean(terms.advantages) < 0
    return terms.sequences.spread(~(bad & (drift > delta)))


@mask(source="open-instruct")
def vaco_tv(terms: Terms, *, delta: float) -> Tensor:
    """drop where mean_t|rho - 1| > delta over the sequence and sign(log rho) A > 0"""
    drifted = terms.sequences.mean((terms.rho - 1).abs()) > delta
    return ~(terms.sequences.spread(drifted) & (terms.log_rho * terms.advantages > 0))


@mask(
    source="M2PO arXiv:2510.01161; tau as in the paper's runs, by Trinity-RFT's m2_threshold",
    needs={Need.WHOLE_STEP, Need.OLD_LOGPROBS},
    step_statistic="m2po_threshold",
)
def m2po(terms: Terms, *, tau: float = 0.04) -> Tensor:
    """drop the largest (log rho)^2 of the step until the mean of the rest < tau"""
    return second_moments(terms.columns) <= terms.known.m2po_threshold


@mask(
    source="80/20 rule arXiv:2506.01939; TRL top_entropy_quantile",
    needs={Need.ENTROPY, Need.WHOLE_STEP},
    reads_mu=False,
    step_statistic="entropy_threshold",
)
def top_entropy(terms: Terms, *, fraction: float = 0.2) -> Tensor:
    """keep the `fraction` of the step's tokens with the largest entropy"""
    return terms.column("entropy").detach().float() >= terms.known.entropy_threshold


@mask(source="TRPO arXiv:1502.05477 bounds by TV; estimated from samples of mu", level="sequence")
def tv_gate(terms: Terms, *, high: float) -> Tensor:
    """keep sequence while mean_t |rho - 1| / 2 <= high, an estimate of TV(prox, mu)"""
    return terms.sequences.spread(terms.sequences.mean((terms.rho - 1).abs()) / 2 <= high)


@mask(source="DAPO arXiv:2503.14476 overlong filtering", needs={Need.TRUNCATED}, level="sequence", reads_mu=False)
def overlong(terms: Terms) -> Tensor:
    """drop sequences cut off at their longest length; the reward still counts in the baseline"""
    return terms.sequences.spread(~terms.columns.required("truncated"))


@mask(source="prime-rl#2960", needs={Need.TOKEN_VERSIONS}, reads_mu=False)
def version_withhold(terms: Terms, *, bound: int) -> Tensor:
    """drop tokens with staleness > bound, and their group only where none is younger; the reward still counts in the baseline"""
    return terms.columns.trained_version - terms.columns.versions <= bound


@mask(source="slime mask-offpolicy-in-partial-rollout", needs={Need.TOKEN_VERSIONS}, reads_mu=False)
def partial_rollout(terms: Terms) -> Tensor:
    """drop tokens older than the newest version of their sequence"""
    versions = terms.columns.versions.to(terms.logprobs.dtype)
    return versions >= terms.sequences.spread(terms.sequences.maximum(versions))


def _anchor(terms: Terms) -> Tensor:
    """[T] log of the policy that rho compares with mu."""
    return terms.behaviour + terms.log_rho


def _inside(values: Tensor, *, low: float, high: float) -> Tensor:
    return (values >= low) & (values <= high)


def _metric(terms: Terms, metric: str) -> Tensor:
    """[T] k3 and the binary KL are never negative; where rounding says so, a lower bound of 0 would drop tokens that agree."""
    match metric:
        case "ratio":
            return terms.rho
        case "k2":
            return terms.log_rho.square() / 2
        case "k3":
            return estimate_k3(terms.log_rho).clamp(min=0)
        case _:
            return binary_kl(terms.behaviour, _anchor(terms)).clamp(min=0)


def _pool(sequences: Segments, values: Tensor, *, over: str) -> Tensor:
    return {"mean": sequences.mean, "sum": sequences.sum, "max": sequences.maximum}[over](values)
