"""Meters beside the loss show drift before it hurts. Raw sums and maxima, which add up over rows, micro-batches, ranks.

A name that ends in "_max" is reduced by maximum, every other by sum; a minimum is kept as the maximum of its negation. Every sum is over
trained tokens before rejection. `finish_meters` turns the totals of a step into numbers to log.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pipelinerl.algorithms.loss.columns import Terms, log_difference
from pipelinerl.algorithms.loss.kl import estimate_k3

Meters = dict[str, Tensor]

QUANTILE_TOKENS = 100
"""Fewest tokens of a row of whose gaps a 0.99 quantile is taken: of fewer it is the largest, which grows with every token looked at."""


def reduces_by_maximum(name: str) -> bool:
    """Say whether a raw meter is combined by maximum rather than by sum."""
    return name.endswith("_max")


def merge_meters(parts: Iterable[Mapping[str, Tensor]]) -> Meters:
    """Combine raw meters of several rows or ranks; a name missing in one part counts as nothing there."""
    merged: Meters = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            else:
                merged[name] = torch.maximum(merged[name], value) if reduces_by_maximum(name) else merged[name] + value
    return merged


def measure(terms: Terms, *, weights: Tensor, clipped: Tensor, keeps: Mapping[str, Tensor]) -> Meters:
    """Raw meters of one row, all 0-dimensional and detached; no copy to the host. `keeps` maps mask names to [T] bool."""
    loss_mask = terms.loss_mask
    ones = torch.ones_like(terms.logprobs)
    to_engine = log_difference(terms.logprobs.detach(), terms.behaviour)
    importance = to_engine.exp()
    ratio = terms.ratio.detach()
    sums: dict[str, Tensor] = {
        "tokens": ones,
        "clipped": clipped.to(ones.dtype),
        "ratio": ratio,
        "ppo_kl": -terms.log_ratio.detach(),
        "mismatch_k1": -to_engine,
        "mismatch_k3": estimate_k3(to_engine),
        "importance": importance,
        "importance_square": importance.square(),
        "weight": weights,
        "weight_zero": (weights == 0).to(ones.dtype),
        "advantage": terms.advantages,
        "advantage_abs": terms.advantages.abs(),
    }
    sums |= {f"{name}_dropped_fraction": (~keep).to(ones.dtype) for name, keep in keeps.items()}
    maxima = {"ratio_max": ratio, "ratio_negative_max": -ratio, "weight_max": weights, "importance_max": importance}
    if terms.columns.entropy is not None:
        sums["entropy"] = terms.column("entropy").detach()
    if terms.columns.divergence is not None:
        sums["divergence"] = terms.column("divergence").detach()
    if terms.columns.reference_logprobs is not None:
        to_reference = log_difference(terms.column("reference_logprobs"), terms.logprobs.detach())
        sums |= {"reference_k1": -to_reference, "reference_k3": estimate_k3(to_reference)}
    meters = {f"{name}_sum": _sum(values, loss_mask) for name, values in sums.items()}
    meters |= {name: _maximum(values, loss_mask) for name, values in maxima.items()}
    present = (terms.sequences.sum(ones) > 0).to(ones.dtype)
    return meters | _version_meters(terms, to_engine) | {"sequences_sum": present.sum()}


def finish_meters(totals: Mapping[str, Tensor | float], *, denominator: float = 1.0) -> dict[str, float]:
    """Numbers to log from a step's totals; `denominator` is the one of the loss. A meter without a token behind it is absent, not 0.0."""
    raw = {name: float(value) for name, value in totals.items()}
    tokens = raw.get("tokens_sum", 0.0)
    if not tokens:
        return {"tokens": 0.0}
    losses = {name.removesuffix("_total"): raw[name] / denominator for name in raw if name.endswith("_total")}
    names = [name.removesuffix("_sum") for name in raw if name.endswith("_sum")]
    numbers = {_LOGGED_AS.get(name, name): raw[f"{name}_sum"] / tokens for name in names if name not in _NOT_MEANS}
    numbers |= losses | {"loss": sum(losses.values()), "tokens": tokens, "sequences": raw["sequences_sum"]}
    numbers |= {name: raw[name] for name in ("ratio_max", "weight_max", "importance_max")} | {"ratio_min": -raw["ratio_negative_max"]}
    numbers["ess_fraction"] = effective_sample_fraction(raw["importance_sum"], square_sum=raw["importance_square_sum"], count=tokens)
    if "kl_penalty_sum" in raw:
        numbers["kl_penalty"] = raw["kl_penalty_sum"] / raw["sequences_sum"]
    if raw.get("versioned_sum"):
        numbers |= {"staleness_mean": raw["staleness_sum"] / raw["versioned_sum"], "staleness_max": raw["staleness_max"]}
    if raw.get("fresh_sum"):
        numbers |= {"logprob_gap_mean": raw["logprob_gap_sum"] / raw["fresh_sum"], "logprob_gap_max": raw["logprob_gap_max"]}
        numbers |= {"mismatch_kl_on_policy": raw["fresh_k3_sum"] / raw["fresh_sum"]}
        numbers |= {"logprob_gap_p99": raw["logprob_gap_p99_max"]} if math.isfinite(raw["logprob_gap_p99_max"]) else {}
    if raw.get("kept_sum"):
        numbers |= {"mismatch_kl_stale_kv": raw["kept_k3_sum"] / raw["kept_sum"], "tokens_stale_kv": raw["kept_sum"]}
    return numbers


def effective_sample_fraction(weight_sum: float, *, square_sum: float, count: float) -> float:
    """(sum w)^2 / (count * sum w^2): 1 for equal weights, 1/count where one weight holds all (PipelineRL, arXiv:2509.19128)."""
    return weight_sum**2 / (count * square_sum) if square_sum else 0.0


_LOGGED_AS = {
    "clipped": "clip_fraction",
    "ratio": "ratio_mean",
    "mismatch_k1": "mismatch_kl_k1",
    "mismatch_k3": "mismatch_kl_k3",
    "reference_k1": "reference_kl_k1",
    "reference_k3": "reference_kl_k3",
    "importance": "importance_mean",
    "weight": "weight_mean",
    "weight_zero": "weight_zero_fraction",
    "advantage": "advantage_mean",
    "advantage_abs": "advantage_abs_mean",
}
_NOT_MEANS = frozenset(
    {
        "tokens",
        "sequences",
        "kl_penalty",
        "importance_square",
        "staleness",
        "versioned",
        "fresh",
        "fresh_k3",
        "kept",
        "kept_k3",
        "logprob_gap",
    }
)


def _version_meters(terms: Terms, to_engine: Tensor) -> Meters:
    """Staleness over tokens with a version; log pi - log mu over sequences that the policy being trained sampled whole.

    For the latter the weights are equal, and no token saw keys and values of older ones, which an engine keeps over a swap. So the gap is
    arithmetic alone: kernels, precision, a wrong swap. What tokens of that policy differ by in sequences that older ones began is what the
    kept keys and values do.
    """
    age = terms.columns.trained_version - terms.columns.versions
    sampled = terms.loss_mask & (terms.columns.versions >= 0)
    age, gap = age.to(to_engine.dtype), to_engine.abs()
    is_whole = terms.sequences.spread(terms.sequences.maximum(age) == 0)
    fresh, kept = sampled & is_whole, sampled & ~is_whole & (age == 0)
    return {
        "versioned_sum": sampled.sum().to(gap.dtype),
        "staleness_sum": _sum(age, sampled),
        "staleness_max": _maximum(age, sampled),
        "fresh_sum": fresh.sum().to(gap.dtype),
        "logprob_gap_sum": _sum(gap, fresh),
        "fresh_k3_sum": _sum(estimate_k3(to_engine), fresh),
        "kept_sum": kept.sum().to(gap.dtype),
        "kept_k3_sum": _sum(estimate_k3(to_engine), kept),
        "logprob_gap_max": _maximum(gap, fresh),
        "logprob_gap_p99_max": _high_quantile(gap, fresh),
    }


def _sum(values: Tensor, inside: Tensor) -> Tensor:
    return torch.where(inside, values, 0).sum()


def _high_quantile(values: Tensor, inside: Tensor) -> Tensor:
    """The 0.99 quantile of a row's values; -inf where they are too few. Over rows the largest counts, so a bad row is not thinned out."""
    gone = torch.full((1,), torch.nan, dtype=values.dtype, device=values.device)
    quantile = torch.cat([torch.where(inside, values, torch.nan), gone]).nanquantile(0.99)
    return torch.where(inside.sum() < QUANTILE_TOKENS, torch.full_like(quantile, -torch.inf), quantile)


def _maximum(values: Tensor, inside: Tensor) -> Tensor:
    bottom = torch.full((1,), -torch.inf, dtype=values.dtype, device=values.device)
    return torch.cat([torch.where(inside, values, -torch.inf), bottom]).max()
