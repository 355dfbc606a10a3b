"""Policy objectives: per-token losses to minimise. Each is `(terms, **options) -> Loss`, before weights, masks and aggregation.

Where a formula is written per sequence, every token carries the form whose aggregation (see the method's row) gives the sequence's.
`T` tokens, `N` sequences; r = pi / prox, sg[.] is `.detach()`, d_l and d_h are `clip_low` and `clip_high`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pipelinerl.algorithms.declare import objective
from pipelinerl.algorithms.loss.call import call_rule
from pipelinerl.algorithms.loss.columns import LOG_LIMIT, Terms, log_difference
from pipelinerl.algorithms.loss.probability import binary_kl
from pipelinerl.algorithms.loss.step_statistics import covariance, uniform_draws
from pipelinerl.algorithms.method import Need, Rule


class Loss(NamedTuple):
    """Per-token loss, and where the trust region acted."""

    values: Tensor
    """[T] with gradient."""
    clipped: Tensor
    """[T] bool: tokens whose gradient the objective cut, bounded or zeroed."""


def objective_loss(terms: Terms, *, rule: Rule) -> Loss:
    """The loss of a method's objective: one of this file, or a function of the user's, whose clipping is not known."""
    found = call_rule(rule, terms, column="objective")
    return found if isinstance(found, Loss) else Loss(found, torch.zeros_like(terms.loss_mask))


@objective(source="PPO arXiv:1707.06347, widths as verl clip_ratio; dual clip arXiv:1912.09729", idle_at_one={"clip_low": "ratio"})
def clip(terms: Terms, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 0.0) -> Loss:
    """-min(r A, clip(r, 1-d_l, 1+d_h) A); where A<0 and dual_clip>0 at most -dual_clip A

    With the dual clip a huge ratio cannot make a bad answer's loss explode.
    """
    return _clipped(terms.ratio, terms.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


@objective(source="GSPO arXiv:2507.18071")
def gspo(terms: Terms, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Loss:
    """clip on s_t = sg[exp(mean_t log r)] pi_t / sg[pi_t]

    s_t has the value of the sequence's length-normalised ratio and the gradient of its own token.
    """
    log_mean = terms.sequences.spread(terms.sequences.mean(terms.log_ratio.detach()))
    ratio = (log_mean + terms.logprobs - terms.logprobs.detach()).exp()
    return _clipped(ratio, terms.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=0.0)


@objective(
    source="MiniMax-M1 arXiv:2506.13585; upper bound 5 as ScaleRL arXiv:2510.13786, no lower bound",
    is_linear=True,
    idle_at_one={"clip_low": "ratio"},
)
def cispo(terms: Terms, *, clip_low: float = 1.0, clip_high: float = 4.0) -> Loss:
    """-sg[clip(r, 1-d_l, 1+d_h)] A log pi

    A clipped token keeps a bounded gradient instead of none.
    """
    ratio = terms.ratio.detach()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return Loss(-bounded * terms.advantages * terms.logprobs, bounded != ratio)


@objective(source="SAPO arXiv:2511.20347")
def sapo(terms: Terms, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Loss:
    """-(4/tau) sigmoid(tau (r-1)) A, tau by the sign of A

    The gradient's weight is 1 at r = 1 and fades to 0 on both sides; faster for bad answers.
    """
    tau = torch.full_like(terms.advantages, tau_negative).masked_fill(terms.advantages > 0, tau_positive)
    gate = 4 / tau * torch.sigmoid(tau * (terms.ratio - 1))
    return Loss(-gate * terms.advantages, torch.zeros_like(terms.loss_mask))


@objective(source="GMPO arXiv:2507.20673 section 4, as TRL quotes it")
def gmpo(terms: Terms, *, clip_low: float = 0.4, clip_high: float = 0.4) -> Loss:
    """-exp(mean_t clamp(log r)) A, the side clamped picked by the sign of A

    A > 0 clamps from above, A < 0 from below, as min(r A, clip(r) A) does.
    """
    clamped = terms.log_ratio.clamp(-clip_low, clip_high)
    upper, lower = torch.minimum(terms.log_ratio, clamped), torch.maximum(terms.log_ratio, clamped)
    chosen = torch.where(terms.advantages >= 0, upper, lower)
    ratio = terms.sequences.mean(chosen).exp()
    losses = -ratio * terms.sequences.mean(terms.advantages)
    return Loss(terms.sequences.spread(losses), chosen != terms.log_ratio)


@objective(source="DPPO; verl dppo_tv", proximal={"engine"}, idle_at_one={"clip_low": "probability", "clip_high": "probability"})
def dppo_tv(terms: Terms, *, clip_low: float = 0.2, clip_high: float = 0.2, cap: float = 20.0) -> Loss:
    """-sg[min(r, cap)] A log pi while pi - mu <= d_h (A>0), >= -d_l (A<0)"""
    keep = _within_total_variation(terms, clip_low=clip_low, clip_high=clip_high)
    return Loss(-terms.ratio.detach().clamp(max=cap) * terms.advantages * terms.logprobs * keep, ~keep)


@objective(source="DPPO; verl dppo_kl", proximal={"engine"})
def dppo_kl(terms: Terms, *, threshold: float, cap: float = 20.0) -> Loss:
    """as dppo_tv, masked where binary KL(mu, pi) > threshold and the token moves away from mu

    A token moves away where its probability has moved in the direction of A.
    """
    logprobs = terms.logprobs.detach()
    away = (logprobs - terms.behaviour) * terms.advantages > 0
    keep = ~((binary_kl(terms.behaviour, logprobs) > threshold) & away)
    return Loss(-terms.ratio.detach().clamp(max=cap) * terms.advantages * terms.logprobs * keep, ~keep)


@objective(source="prime-rl default loss", proximal={"engine"}, idle_at_one={"clip_low": "probability", "clip_high": "probability"})
def prime_rl(terms: Terms, *, clip_low: float = 0.2, clip_high: float = 0.2, adv_tau: float = 1.0) -> Loss:
    """-keep adv_tau A r, keep = the mask of dppo_tv

    The gradient flows through r.
    """
    keep = _within_total_variation(terms, clip_low=clip_low, clip_high=clip_high)
    return Loss(-(adv_tau * terms.advantages) * terms.ratio * keep, ~keep)


@objective(source="prime-rl ipo", proximal={"engine"}, is_linear=True, idle_at_one={"threshold": "probability"})
def ipo(terms: Terms, *, threshold: float, adv_tau: float = 1.0) -> Loss:
    """-keep adv_tau A r, keep = |pi - mu| <= threshold

    Tokens are kept whatever the sign of A.
    """
    keep = _probability_change(terms).abs() <= threshold
    return Loss(-(adv_tau * terms.advantages) * terms.ratio * keep, ~keep)


@objective(
    source="prime-rl opd",
    needs={Need.REFERENCE_LOGPROBS},
    proximal={"engine"},
    reads_advantages=False,
    idle_at_one={"threshold": "probability"},
)
def opd(terms: Terms, *, threshold: float = 0.2) -> Loss:
    """-keep sg[log ref - log pi] r, keep = pi - mu >= -threshold"""
    advantages = log_difference(terms.column("reference_logprobs"), terms.logprobs.detach())
    keep = _probability_change(terms) >= -threshold
    return Loss(-advantages * terms.ratio * keep, ~keep)


@objective(
    source="GKD arXiv:2306.13649 equation 1, on the policy's own answers; mix its beta, as TRL generalized_jsd_loss",
    needs={Need.REFERENCE_LOGPROBS, Need.DIVERGENCE},
    proximal=set(),
    reads_advantages=False,
)
def gkd(terms: Terms, *, mix: float = 0.5) -> Loss:
    """mix KL(ref || m) + (1 - mix) KL(pi || m), m = mix ref + (1 - mix) pi; at mix 0 KL(ref || pi), at 1 KL(pi || ref), over all words

    The trainer computes it by `mix`, beside the log-probabilities.
    """
    return Loss(terms.column("divergence"), torch.zeros_like(terms.loss_mask))


@objective(source="TOPR arXiv:2503.14286, trajectory ratio; good and bad by the sign of A", proximal={"engine"})
def topr(terms: Terms, *, cap: float = 1.0) -> Loss:
    """A>0: -A log pi; else -sg[min(prod_t r, cap)] A log pi"""
    log_product = terms.sequences.sum(terms.log_ratio.detach()).clamp(-LOG_LIMIT, LOG_LIMIT)
    return _tapered(terms, terms.sequences.spread(log_product.exp()), cap=cap)


@objective(source="ROLL, which tells good from bad by the score, here by the sign of A", proximal={"engine"})
def topr_token(terms: Terms, *, cap: float = 1.0) -> Loss:
    """as topr with the ratio of the token"""
    return _tapered(terms, terms.ratio.detach(), cap=cap)


@objective(source="VESPO arXiv:2602.10693, constants as TRL vespo_k_pos, vespo_lambda_pos, ...")
def vespo(
    terms: Terms, *, k_positive: float = 2.0, lambda_positive: float = 3.0, k_negative: float = 3.0, lambda_negative: float = 2.0
) -> Loss:
    """-sg[phi(w)] A log pi, phi(w) = e^lambda w^k e^(-lambda w), w = prod_t r; k and lambda by the sign of A

    phi is 1 at w = 1; log w lies within log 1e-8 .. 20, as in the published code.
    """
    log_w = terms.sequences.spread(terms.sequences.sum(terms.log_ratio.detach())).clamp(math.log(1e-8), LOG_LIMIT)
    is_good = terms.advantages >= 0
    k = torch.full_like(log_w, k_negative).masked_fill(is_good, k_positive)
    rate = torch.full_like(log_w, lambda_negative).masked_fill(is_good, lambda_positive)
    phi = (rate + k * log_w - rate * log_w.exp()).exp()
    return Loss(-phi * terms.advantages * terms.logprobs, torch.zeros_like(terms.loss_mask))


@objective(source="Kimi k1.5 arXiv:2501.12599", is_linear=True, has_own_term=True)
def kimi(terms: Terms, *, tau: float) -> Loss:
    """-A log pi + tau/2 (log r)^2"""
    return Loss(-terms.advantages * terms.logprobs + tau / 2 * terms.log_ratio.square(), torch.zeros_like(terms.loss_mask))


@objective(source="verl dro", is_linear=True, has_own_term=True)
def dro(terms: Terms, *, beta: float) -> Loss:
    """-(A log pi - beta/2 (log r)^2)

    The loss of `kimi` under the name of its other derivation.
    """
    return kimi(terms, tau=beta)


@objective(source="GPG arXiv:2504.02546", proximal=set(), is_linear=True)
def gpg(terms: Terms) -> Loss:
    """-A log pi: the policy gradient, without a trust region"""
    return Loss(-terms.advantages * terms.logprobs, torch.zeros_like(terms.loss_mask))


@objective(source="PipelineRL arXiv:2509.19128, its run's cap; its code suggests 1.02", proximal={"engine"}, is_linear=True)
def reinforce_is(terms: Terms, *, cap: float = 5.0) -> Loss:
    """-sg[min(r, cap)] A log pi

    PipelineRL's epsilon is cap - 1.
    """
    ratio = terms.ratio.detach()
    return Loss(-ratio.clamp(max=cap) * terms.advantages * terms.logprobs, ratio > cap)


@objective(
    source="arXiv:2505.22617; constants as verl clip_cov_ratio, _lb, _ub, which passes over tokens the clip took",
    needs={Need.WHOLE_STEP, Need.OLD_LOGPROBS},
    step_statistic="pick_probability",
    idle_at_one={"clip_low": "ratio"},
)
def clip_cov(
    terms: Terms, *, clip_low: float = 0.2, clip_high: float = 0.2, fraction: float = 2e-4, low: float = 1.0, high: float = 5.0
) -> Loss:
    """clip, zeroed for a random part of the tokens with low < cov(A, log pi) < high

    The draw depends on the token's own numbers alone, so that any packing or sharding picks the same tokens; each candidate is picked
    with the probability that makes `fraction` of all tokens expected.
    """
    base = _clipped(terms.ratio, terms.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=0.0)
    cov = covariance(terms.columns, statistics=terms.known)
    candidates = (cov > low) & (cov < high) & terms.loss_mask
    zeroed = candidates & (uniform_draws(terms.columns) < terms.known.pick_probability)
    return Loss(torch.where(zeroed, torch.zeros_like(base.values), base.values), base.clipped | zeroed)


@objective(
    source="arXiv:2505.22617; constants as verl kl_cov_ratio, ppo_kl_coef",
    needs={Need.WHOLE_STEP, Need.OLD_LOGPROBS},
    has_own_term=True,
    step_statistic="covariance_threshold",
)
def kl_cov(terms: Terms, *, fraction: float = 2e-4, beta: float = 0.1) -> Loss:
    """-r A, + beta |log r| on the tokens of largest cov(A, log pi)

    The `fraction` of tokens with the largest covariance has the second term.
    """
    chosen = (covariance(terms.columns, statistics=terms.known) >= terms.known.covariance_threshold) & terms.loss_mask
    return Loss(-terms.ratio * terms.advantages + beta * terms.log_ratio.abs() * chosen, chosen)


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
