"""Penalties that hold the policy near a reference policy. d = log ref - log pi of the sampled token (Schulman, "Approximating KL");
"full" is the divergence over all words, which the trainer computes beside the log-probabilities.

Their values estimate the same KL(pi || ref); their gradients differ. k1's own gradient has expectation zero (its expected
derivative is that of a normalised distribution), k2's is that of the KL, k3's is that of KL(ref || pi).
"""

from __future__ import annotations

from torch import Tensor

from pipelinerl.algorithms.declare import kl
from pipelinerl.algorithms.loss.columns import Terms, log_difference
from pipelinerl.algorithms.method import Need


def estimate_k3(d: Tensor, *, clamp: float = 0.0) -> Tensor:
    """e^d - d - 1, at most `clamp` where that is not 0: unbiased while nothing is clamped, never negative.

    Above the clamp a token has no gradient. 10 is reached at d = 2.6; without it, one token at d = 10 outweighs 10^4.
    """
    values = d.expm1() - d
    return values.clamp(max=clamp) if clamp else values


@kl()
def k1(terms: Terms, *, beta: float) -> Tensor:
    """beta (log pi - log ref); with a target, beta follows the KL

    Unbiased, of high variance, may be negative.
    """
    return -_gap(terms)


@kl()
def k2(terms: Terms, *, beta: float) -> Tensor:
    """beta (log pi - log ref)^2 / 2; with a target, beta follows the KL

    Of low variance, biased, with the gradient of the KL.
    """
    return _gap(terms).square() / 2


@kl(
    source="GRPO arXiv:2402.03300, beta as in its section 4.2; clamp as verl, OpenRLHF, SkyRL; fading as PipelineRL final_kl_coef; target"
    " as arXiv:1909.08593, verl"
)
def k3(terms: Terms, *, beta: float = 0.04, clamp: float = 10.0) -> Tensor:
    """beta min(e^d - d - 1, clamp), d = log ref - log pi, within +-20; with a target, beta follows the KL"""
    return estimate_k3(_gap(terms), clamp=clamp)


@kl()
def k3_plus(terms: Terms, *, beta: float, clamp: float = 10.0) -> Tensor:
    """value of k3, clamped as k3, gradient of k2, which is not; with a target, beta follows the KL"""
    d = _gap(terms)
    square = d.square() / 2
    return estimate_k3(d, clamp=clamp).detach() + square - square.detach()


@kl(source="mix as GKD arXiv:2306.13649; target as arXiv:1909.08593, verl", needs={Need.REFERENCE_LOGPROBS, Need.DIVERGENCE})
def full(terms: Terms, *, beta: float, mix: float = 1.0) -> Tensor:
    """beta (mix KL(ref || m) + (1 - mix) KL(pi || m), m = mix ref + (1 - mix) pi; at mix 0 KL(ref || pi), at 1 KL(pi || ref)), over all
    words: no estimate; with a target, beta follows the KL
    """
    return terms.column("divergence")


@kl(source="slime; DeepSeek-V3.2 arXiv:2512.02556; target as arXiv:1909.08593, verl")
def unbiased(terms: Terms, *, beta: float, clamp: float = 10.0) -> Tensor:
    """beta r k3, k3 clamped; with a target, beta follows the KL

    An expectation under prox.
    """
    return terms.ratio * estimate_k3(_gap(terms), clamp=clamp)


def _gap(terms: Terms) -> Tensor:
    """[T] d = log ref - log pi."""
    return log_difference(terms.column("reference_logprobs"), terms.logprobs)
