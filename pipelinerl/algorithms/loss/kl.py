"""Penalties that hold the policy near a reference policy. d = log ref - log pi of the sampled token (Schulman, "Approximating KL");
"full" is the divergence over all words, which the trainer computes beside the log-probabilities.

Their values estimate the same KL(pi || ref); their gradients differ. k1's own gradient has expectation zero (its expected
derivative is that of a normalised distribution), k2's is that of the KL, k3's is that of KL(ref || pi).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pipelinerl.algorithms.loss.columns import Terms, log_difference
from pipelinerl.algorithms.method import Rule


def k1(d: Tensor) -> Tensor:
    """-d: unbiased, high variance, may be negative."""
    return -d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2: low variance, biased, gradient of the KL."""
    return d.square() / 2


def k3(d: Tensor, *, clamp: float = 0.0) -> Tensor:
    """e^d - d - 1, at most `clamp` where that is not 0: unbiased while nothing is clamped, never negative."""
    values = d.expm1() - d
    return values.clamp(max=clamp) if clamp else values


def k3_plus(d: Tensor, *, clamp: float = 0.0) -> Tensor:
    """Value of k3, gradient of k2, straight through (verl)."""
    return k3(d, clamp=clamp).detach() + k2(d) - k2(d).detach()


_ESTIMATORS: dict[str, Callable[..., Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "k3_plus": k3_plus}


def penalty(terms: Terms, *, rule: Rule) -> Tensor:
    """[T] penalty per token, with gradient. "unbiased" is ratio * k3, so that it is an expectation under prox (DeepSeek-V3.2)."""
    if rule.name == "full":
        return terms.column("divergence")
    d = log_difference(terms.column("reference_logprobs"), terms.logprobs)
    clamp = {"clamp": float(rule.options["clamp"] or 0.0)} if "clamp" in rule.options else {}
    return terms.ratio * k3(d, **clamp) if rule.name == "unbiased" else _ESTIMATORS[rule.name](d, **clamp)
