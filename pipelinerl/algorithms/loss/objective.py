"""Policy objectives: per-token losses to minimise. Each is `(terms, **options) -> Loss`, before weights, masks and aggregation.

Where a formula is written per sequence, every token carries the form whose aggregation (see the method's row) gives the sequence's.
`T` tokens, `N` sequences; sg[.] is `.detach()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pipelinerl.algorithms.loss.columns import LOG_LIMIT, Terms, log_difference
from pipelinerl.algorithms.loss.own import call_own
from pipelinerl.algorithms.loss.probability import binary_kl
from pipelinerl.algorithms.loss.step_statistics import covariance, uniform_draws
from pipelinerl.algorithms.method import Rule
from pipelinerl.algorithms.own import is_own


class Loss(NamedTuple):
    """Per-token loss, and where the trust region acted."""

    values: Tensor
    """[T] with gradient."""
    clipped: Tensor
    """[T] bool: tokens whose gradient the objective cut, bounded or zeroed."""


def objective_loss(terms: Terms, *, rule: Rule) -> Loss:
    """The loss of a method's objective: one of this file, or a function of the user's, whose clipping is not known."""
    if is_own(rule.name):
        return Loss(call_own(rule, terms, column="objective"), torch.zeros_like(terms.trains))
    return OBJECTIVES[rule.name](terms, **rule.options)


def clip(terms: Terms, *, clip_low: float, clip_high: float, dual_clip: float) -> Loss:
    """-min(r A, clip(r) A); where A < 0 and dual_clip > 0, at most -dual_clip A: a huge ratio cannot make a bad answer's loss explode."""
    return _clipped(terms.ratio, terms.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def gspo(terms: Terms, *, clip_low: float, clip_high: float) -> Loss:
    """Clip on the length-normalised sequence ratio; s_t has the value of the sequence's and the gradient of its own token."""
    log_mean = terms.sequences.spread(terms.sequences.mean(terms.log_ratio.detach()))
    ratio = (log_mean + terms.logprobs - terms.logprobs.detach()).exp()
    return _clipped(ratio, terms.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=0.0)


def cispo(terms: Terms, *, clip_low: float, clip_high: float) -> Loss:
    """-sg[clip(r)] A log pi: a clipped token keeps a bounded gradient instead of none."""
    ratio = terms.ratio.detach()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return Loss(-bounded * terms.advantages * terms.logprobs, bounded != ratio)


def sapo(terms: Terms, *, tau_positive: float, tau_negative: float) -> Loss:
    """-(4/tau) sigmoid(tau (r-1)) A: gradient weight 1 at r = 1, fading to 0 on both sides; faster for bad answers."""
    tau = torch.full_like(terms.advantages, tau_negative).masked_fill(terms.advantages > 0, tau_positive)
    gate = 4 / tau * torch.sigmoid(tau * (terms.ratio - 1))
    return Loss(-gate * terms.advantages, torch.zeros_like(terms.trains))


def gmpo(terms: Terms, *, clip_low: float, clip_high: float) -> Loss:
    """-exp(mean_t clamp(log r)) A; A > 0 clamps from above, A < 0 from below, as min(r A, clip(r) A) does."""
    clamped = terms.log_ratio.clamp(-clip_low, clip_high)
    upper, lower = torch.minimum(terms.log_ratio, clamped), torch.maximum(terms.log_ratio, clamped)
    chosen = torch.where(terms.advantages >= 0, upper, lower)
    ratio = terms.sequences.mean(chosen).exp()
    losses = -ratio * terms.sequences.mean(terms.advantages)
    return Loss(terms.sequences.spread(losses), chosen != terms.log_ratio)


def dppo_tv(terms: Terms, *, clip_low: float, clip_high: float, cap: float) -> Loss:
    """-sg[min(r, cap)] A log pi while the probability has moved less than the bound in the direction of A."""
    keep = _within_total_variation(terms, clip_low=clip_low, clip_high=clip_high)
    return Loss(-terms.ratio.detach().clamp(max=cap) * terms.advantages * terms.logprobs * keep, ~keep)


def dppo_kl(terms: Terms, *, threshold: float, cap: float) -> Loss:
    """As `dppo_tv`, masked where binary KL(mu, pi) exceeds the threshold and the token has moved away from mu in the direction of A."""
    logprobs = terms.logprobs.detach()
    away = (logprobs - terms.behaviour) * terms.advantages > 0
    keep = ~((binary_kl(terms.behaviour, logprobs) > threshold) & away)
    return Loss(-terms.ratio.detach().clamp(max=cap) * terms.advantages * terms.logprobs * keep, ~keep)


def prime_rl(terms: Terms, *, clip_low: float, clip_high: float, adv_tau: float) -> Loss:
    """-keep adv_tau A r with the mask of `dppo_tv`; the gradient flows through r."""
    keep = _within_total_variation(terms, clip_low=clip_low, clip_high=clip_high)
    return Loss(-(adv_tau * terms.advantages) * terms.ratio * keep, ~keep)


def ipo(terms: Terms, *, threshold: float, adv_tau: float) -> Loss:
    """-keep adv_tau A r with keep = |pi - mu| <= threshold, whatever the sign of A."""
    keep = _probability_change(terms).abs() <= threshold
    return Loss(-(adv_tau * terms.advantages) * terms.ratio * keep, ~keep)


def opd(terms: Terms, *, threshold: float) -> Loss:
    """On-policy distillation: A = sg[log ref - log pi], kept while pi - mu >= -threshold. The advantage column is not read."""
    advantages = log_difference(terms.column("reference_logprobs"), terms.logprobs.detach())
    keep = _probability_change(terms) >= -threshold
    return Loss(-advantages * terms.ratio * keep, ~keep)


def gkd(terms: Terms, *, mix: float) -> Loss:
    """The divergence from the teacher's whole distribution (arXiv:2306.13649), which the trainer computed by `mix`."""
    return Loss(terms.column("divergence"), torch.zeros_like(terms.trains))


def topr(terms: Terms, *, cap: float) -> Loss:
    """A > 0: -A log pi. Else: weighted by min(product of the ratios of the whole sequence, cap), detached."""
    log_product = terms.sequences.sum(terms.log_ratio.detach()).clamp(-LOG_LIMIT, LOG_LIMIT)
    return _tapered(terms, terms.sequences.spread(log_product.exp()), cap=cap)


def topr_token(terms: Terms, *, cap: float) -> Loss:
    """`topr` with the ratio of the token in place of the trajectory's (ROLL)."""
    return _tapered(terms, terms.ratio.detach(), cap=cap)


def vespo(terms: Terms, *, k_positive: float, lambda_positive: float, k_negative: float, lambda_negative: float) -> Loss:
    """-sg[phi(w)] A log pi with the gamma weight phi(w) = e^lambda w^k e^(-lambda w), 1 at w = 1, w the ratio of the whole sequence.

    log w lies within log 1e-8 .. 20, as in the published code.
    """
    log_w = terms.sequences.spread(terms.sequences.sum(terms.log_ratio.detach())).clamp(math.log(1e-8), LOG_LIMIT)
    is_good = terms.advantages >= 0
    k = torch.full_like(log_w, k_negative).masked_fill(is_good, k_positive)
    rate = torch.full_like(log_w, lambda_negative).masked_fill(is_good, lambda_positive)
    phi = (rate + k * log_w - rate * log_w.exp()).exp()
    return Loss(-phi * terms.advantages * terms.logprobs, torch.zeros_like(terms.trains))


def kimi(terms: Terms, *, tau: float) -> Loss:
    """-A log pi + tau/2 (log pi - log prox)^2."""
    return Loss(-terms.advantages * terms.logprobs + tau / 2 * terms.log_ratio.square(), torch.zeros_like(terms.trains))


def dro(terms: Terms, *, beta: float) -> Loss:
    """-(A log pi - beta/2 (log r)^2): the loss of `kimi` under the name of its other derivation."""
    return kimi(terms, tau=beta)


def gpg(terms: Terms) -> Loss:
    """-A log pi."""
    return Loss(-terms.advantages * terms.logprobs, torch.zeros_like(terms.trains))


def reinforce_is(terms: Terms, *, cap: float) -> Loss:
    """-sg[min(pi/mu, cap)] A log pi (arXiv:2509.19128). PipelineRL's epsilon is cap - 1."""
    ratio = terms.ratio.detach()
    return Loss(-ratio.clamp(max=cap) * terms.advantages * terms.logprobs, ratio > cap)


def clip_cov(terms: Terms, *, clip_low: float, clip_high: float, fraction: float, low: float, high: float) -> Loss:
    """`clip`, zeroed for a random few of the tokens whose covariance lies in (low, high) (arXiv:2505.22617).

    The draw depends on the token's own numbers alone, so that any packing or sharding picks the same tokens; each candidate is picked
    with the probability that makes `fraction` of all tokens expected.
    """
    base = _clipped(terms.ratio, terms.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=0.0)
    cov = covariance(terms.columns, statistics=terms.known)
    candidates = (cov > low) & (cov < high) & terms.trains
    zeroed = candidates & (uniform_draws(terms.columns) < terms.known.pick_probability)
    return Loss(torch.where(zeroed, torch.zeros_like(base.values), base.values), base.clipped | zeroed)


def kl_cov(terms: Terms, *, fraction: float, beta: float) -> Loss:
    """-r A, + beta |log r| on the `fraction` of tokens with the largest covariance (arXiv:2505.22617)."""
    chosen = (covariance(terms.columns, statistics=terms.known) >= terms.known.covariance_threshold) & terms.trains
    return Loss(-terms.ratio * terms.advantages + beta * terms.log_ratio.abs() * chosen, chosen)


OBJECTIVES: dict[str, Callable[..., Loss]] = {
    function.__name__: function
    for function in (
        clip, gspo, cispo, sapo, gmpo, dppo_tv, dppo_kl, prime_rl, ipo, opd, gkd,
        topr, topr_token, vespo, kimi, dro, gpg, reinforce_is, clip_cov, kl_cov,
    )
}  # fmt: skip


def _clipped(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float) -> Loss:
    plain, bounded = -ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    losses, clipped = torch.maximum(plain, bounded), bounded > plain
    if dual_clip > 0:
        ceiling = -dual_clip * advantages
        cut = (advantages < 0) & (losses > ceiling)
        losses, clipped = torch.where(cut, ceiling, losses), clipped | cut
    return Loss(losses, clipped)


def _probability_change(terms: Terms) -> Tensor:
    return terms.logprobs.detach().exp() - terms.behaviour.exp()


def _within_total_variation(terms: Terms, *, clip_low: float, clip_high: float) -> Tensor:
    change = _probability_change(terms)
    return torch.where(terms.advantages > 0, change <= clip_high, change >= -clip_low)


def _tapered(terms: Terms, ratio: Tensor, *, cap: float) -> Loss:
    bad = terms.advantages <= 0
    coefficient = torch.where(bad, ratio.clamp(0, cap), torch.ones_like(ratio))
    return Loss(-coefficient * terms.advantages * terms.logprobs, bad & (ratio > cap))
