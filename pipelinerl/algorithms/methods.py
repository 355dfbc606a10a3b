"""METHODS, the table of training methods, and `resolve`, which gives the one method a run uses.

A row changes columns of `START`; everything else stays as there. A new method is one more `_row`. A rule that does not exist yet is one
function under a decorator of `declare`, in `advantage` where it reads rewards, in `loss` where it reads log-probabilities.

A trust region acts only where its ratio moves, so rows that have one draw it around the engine's own probabilities mu, which are those of
the policy that sampled: the old policy of the published formula. TRL's AsyncGRPO, verl's bypass mode and prime-rl do the same. It costs no
forward pass, holds through several epochs of a step, and over tokens of mixed versions it learns as well as the decoupled form
(`scripts/bench/staleness.py`). Rows whose point is an importance weight from rho = prox / mu have no trust region (objective gpg, whose
prox is the current policy): with one update per batch a clip around it would be a clip around a point.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from pipelinerl.algorithms.method import ALWAYS_OFFERED, REFERENCE_OFFERS, TRAINER_OFFERS, Method, Need
from pipelinerl.algorithms.rules import with_columns
from pipelinerl.algorithms.validation import RunFacts, problems_of
from pipelinerl.config import Config, Mode
from pipelinerl.errors import ConfigError
from pipelinerl.runtime.plugin import nearest

METHODS: dict[str, Method] = {}

START = with_columns(
    Method(name="start", formula="", source=""),
    {"advantage": "grpo", "objective": "clip", "proximal": "engine", "weight": "none", "aggregation": "token-mean"},
)

_WEIGHTED: dict[str, Any] = {"objective": "gpg", "proximal": "current", "weight": "tis_token"}
"""No trust region: the policy gradient, times an importance weight from pi / mu."""
_TIS_5: dict[str, Any] = {"name": "tis_token", "cap": 5.0}


def _row(name: str, formula: str, source: str, **columns: Any) -> None:
    METHODS[name] = with_columns(dataclasses.replace(START, name=name, formula=formula, source=source), columns)


# --- group baselines -------------------------------------------------------------------------------------------------------------

_row(
    "grpo",
    "(R - mean)/(std + 1e-6), pi/mu clipped at 0.8 and 1.2, token mean",
    "arXiv:2402.03300, token mean as TRL and verl, pi/mu as TRL AsyncGRPO",
)
_row("grpo_tis", "grpo with min(pi/mu, 2) as a weight in place of the clip", "TIS as verl, slime, OAT", **_WEIGHTED)
_row(
    "grpo_deepseekmath",
    "grpo as published: mean over sequences of token means, + 0.04 k3",
    "arXiv:2402.03300",
    aggregation="seq-mean-token-mean",
    kl="k3",
)
_row("grpo_dual_clip", "grpo; where A < 0 the loss is at most 3 |A|", "arXiv:1912.09729; verl", objective={"dual_clip": 3.0})
_row(
    "dr_grpo",
    "R - mean, no std; token sums over a constant length",
    "arXiv:2503.20783",
    advantage="dr_grpo",
    aggregation="seq-mean-token-sum-norm",
)
_row(
    "dapo",
    "grpo with pi/mu clipped at 0.8 and 1.28, groups of equal rewards set aside",
    "arXiv:2503.14476",
    objective={"clip_high": 0.28},
    group_filter="zero_variance",
)
_row(
    "grpo_batch_std",
    "grpo divided by the std of the whole step's rewards, not of its group's",
    "TRL scale_rewards='batch'",
    advantage="dr_grpo",
    batch="std_of_rewards",
)
_row("grpo_top_entropy", "grpo on the fifth of the tokens with the largest entropy", "arXiv:2506.01939", masks="top_entropy")
_row("rloo", "R - mean of the other siblings", "arXiv:2402.14740", advantage="rloo")
_row(
    "rloo_early_stop",
    "rloo under an unbiased early stop, min(pi/mu, 2) as a weight; token sums over a constant length, per rollout started",
    "this project",
    advantage="rloo_doubly_robust",
    aggregation="seq-mean-token-sum-norm",
    **_WEIGHTED,
)
_row("remax", "R - R(greedy)", "arXiv:2310.10505", advantage="remax")
_row("opo", "R - length-weighted mean", "arXiv:2505.23585", advantage="opo")
_row(
    "gdpo",
    "each reward normalised in its group, weighted, whitened over the step",
    "GDPO, NeMo-RL",
    advantage="gdpo",
    batch="whiten_sequences",
)
_row("grpo_passk", "only the best sibling is reinforced, by its lead; verl divides by the group's std, too", "verl", advantage="passk")
_row("maxrl", "(R - mean) / mean: harder prompts weigh more", "prime-rl", advantage="maxrl")
_row("gpg", "-alpha min(pi/mu, 2) A log pi", "arXiv:2504.02546, TIS as verl", advantage="dr_grpo", batch="gpg_alpha", **_WEIGHTED)
_row(
    "reinforce_pp",
    "returns with a per-token KL, whitened over the step",
    "arXiv:2501.03262",
    advantage="reinforce_pp",
    batch="whiten_tokens",
)
_row(
    "reinforce_pp_baseline",
    "R - mean, whitened over the tokens of the step",
    "arXiv:2501.03262",
    advantage="dr_grpo",
    batch="whiten_tokens",
)
_row("rae", "R - moving mean of the agent's role", "arXiv:2506.24119", advantage="rae")
_row("otb", "variance-optimal baseline per token position, min(pi/mu, 2) as a weight", "verl", advantage="otb", **_WEIGHTED)

# --- steps and turns -------------------------------------------------------------------------------------------------------------

_row("process_grpo", "step scores normalised in the group; a token gets the steps that follow", "arXiv:2402.03300", advantage="step_grpo")
_row("step_difference", "credit is the rise of the step score, + outcome", "potential-based shaping", advantage="step_difference")
_row("step_min", "credit is the worst score still to come, + outcome", "arXiv:2504.15275", advantage="step_min")
_row("step_reinforce", "discounted return per step", "ROLL", advantage="step_reinforce")
_row("gigpo", "group advantage + advantage among equal states, both over their std", "arXiv:2505.10978", advantage="gigpo")
_row(
    "hgpo", "advantages among turns from equal states, weighed by how far back their histories agree", "arXiv:2602.22817", advantage="hgpo"
)
_row("mt_grpo", "turn rewards normalised by depth, + outcome normalised in the group", "arXiv:2505.11821", advantage="mt_grpo")
_row(
    "tree_grpo",
    "leaves compared within their rollout and over the group; a turn gets the mean of its leaves",
    "arXiv:2509.21240",
    advantage="tree_grpo",
)
_row("tree_rpo", "the mean of a subtree's leaves against its siblings'", "arXiv:2506.05183", advantage="tree_rpo")
_row(
    "prime",
    "implicit process rewards and outcome, RLOO each, whitened",
    "arXiv:2502.01456",
    advantage="prime",
    batch="whiten_tokens",
    group_filter="accuracy_band",
    critic="implicit_prm",
)

# --- with a critic ---------------------------------------------------------------------------------------------------------------

_row(
    "ppo",
    "pi/mu clipped * whitened GAE, value function trained beside",
    "arXiv:1707.06347",
    advantage="gae",
    batch="whiten_tokens",
    critic="clipped",
)
_row(
    "turn_ppo",
    "ppo with one advantage per turn: GAE from turn to turn",
    "AReaL",
    advantage="turn_gae",
    batch="whiten_tokens",
    critic="clipped",
)
_row(
    "vapo",
    "PPO with length-adaptive GAE, clip-higher and NLL on correct answers",
    "arXiv:2504.05118",
    advantage="vapo_gae",
    objective={"clip_high": 0.28},
    critic="clipped",
    auxiliary="positive_nll",
)

# --- objectives ------------------------------------------------------------------------------------------------------------------

_row(
    "gspo",
    "clip on the geometric mean ratio of the sequence",
    "arXiv:2507.18071",
    objective="gspo",
    aggregation="seq-mean-token-mean",
)
_row("cispo", "-sg[clip(r)] A log pi: clipped tokens keep a gradient", "arXiv:2506.13585", objective="cispo")
_row("sapo", "sigmoid gate instead of a clip", "arXiv:2511.20347", objective="sapo", aggregation="seq-mean-token-mean")
_row("gmpo", "geometric mean of clamped ratios", "arXiv:2507.20673", objective="gmpo", aggregation="seq-mean-token-mean")
_row("dppo_tv", "masked by the change of probability, not of ratio", "DPPO; verl", objective="dppo_tv")
_row("dppo_kl", "masked by binary KL when moving away; state the threshold", "DPPO; verl", objective="dppo_kl")
_row("prime_rl", "-keep A pi/mu + 1e-3 (log pi/mu)^2", "prime-rl", objective="prime_rl", auxiliary="squared_log_ratio")
_row("ipo", "prime_rl with keep = |pi - mu| <= threshold; state it", "prime-rl", objective="ipo", auxiliary="squared_log_ratio")
_row("opd", "distillation: A = log ref - log pi", "prime-rl", advantage="none", objective="opd", auxiliary="squared_log_ratio")
_row(
    "gkd",
    "distillation: half-way Jensen-Shannon divergence from a teacher over all words, on the policy's own answers",
    "arXiv:2306.13649, as TRL's GKDTrainer",
    advantage="none",
    objective="gkd",
    proximal="current",
)
_row(
    "topr",
    "negatives weighted by the clipped ratio of the trajectory",
    "arXiv:2503.14286",
    objective="topr",
    aggregation="seq-mean-token-sum",
)
_row("topr_token", "topr with the ratio of each token; bad is A <= 0", "ROLL, by the score", objective="topr_token")
_row(
    "vespo",
    "-phi(w) A log pi: a smooth weight of the sequence's ratio in place of a clip",
    "arXiv:2602.10693, as TRL",
    objective="vespo",
)
_row("kimi", "-A log pi + tau/2 (log r)^2; state tau", "arXiv:2501.12599", advantage="dr_grpo", objective="kimi")
_row("dro", "-(A log pi - beta/2 (log r)^2); state beta", "verl", advantage="dr_grpo", objective="dro")
_row("clip_cov", "clip of pi/mu, and zero for some tokens of high covariance", "arXiv:2505.22617", objective="clip_cov")
_row("kl_cov", "pi/mu * A, + |log pi/mu| on the tokens of highest covariance", "arXiv:2505.22617", objective="kl_cov")
_row("reinforce_is", "-sg[min(pi/mu, 5)] A log pi", "PipelineRL arXiv:2509.19128", advantage="rloo", objective="reinforce_is")

# --- corrections -----------------------------------------------------------------------------------------------------------------

_row(
    "decoupled_ppo",
    "clip around the policy before the first of several epochs, times min(prox/mu, 5)",
    "AReaL arXiv:2505.24298",
    proximal="recomputed",
    weight=_TIS_5,
)
_row("loglinear_ppo", "decoupled_ppo, prox interpolated by versions", "AReaL prox_approx", proximal="loglinear", weight=_TIS_5)
_row("icepop", "pi/mu as a weight; tokens outside 0.5 <= pi/mu <= 5 do not train", "IcePop", **(_WEIGHTED | {"weight": "icepop"}))
_row("mis", "pi/mu as a weight; tokens with pi/mu > 3 do not train", "MIS", **(_WEIGHTED | {"weight": "mis_token"}))
_row(
    "seq_mask_tis",
    "grpo_tis, and sequences whose geometric mean drifts are dropped",
    "NeMo-RL",
    **_WEIGHTED,
    masks={"name": "geo_rs", "low": 0.999, "high": 1.002},
)
_row("opsm", "drop bad answers the policy has already left", "slime; DeepSeek-V3.2", masks="opsm")
_row("m2po", "clip around mu, without the tokens of largest second moment", "arXiv:2510.01161", masks="m2po")


def method_of(config: Config) -> Method:
    """The method a run's config names, checked against what this system supplies. Raises `ConfigError` as `resolve` does."""
    return _checked(config.algorithm.name, config.algorithm.overrides, run=facts_of(config))


def facts_of(config: Config) -> RunFacts:
    """Collect the facts of a run that the rules of a method are judged by."""
    offers = ALWAYS_OFFERED | TRAINER_OFFERS
    offers |= REFERENCE_OFFERS if config.reference.folders else frozenset()
    offers -= {Need.DIVERGENCE} if config.trainer.layout.pipeline > 1 else frozenset()
    offers |= {Need.STEP_SCORES} if config.prm.is_used else frozenset()
    offers |= {Need.ANCHORS} if config.environment.is_used else frozenset()  # an agent outside of the run names no states
    offers |= {Need.TURNS} if config.environment.is_used or config.gateway is not None else frozenset()
    offers |= {Need.PREDICTIONS} if config.stops_early else frozenset()
    bound = {Mode.SYNC: 0, Mode.ONE_STEP_OFF: 1}.get(config.pipeline.mode, config.pipeline.max_staleness)
    return RunFacts(
        group_size=config.rollout.group_size,
        samples_per_step=config.batch.groups_per_step * config.rollout.group_size,
        max_staleness=bound,
        epochs=config.trainer.epochs,
        stops_early=config.stops_early,
        compares_siblings=config.compares_siblings,
        may_branch=config.gateway is not None,
        offers=offers,
    )


def resolve(
    name: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    group_size: int,
    has_critic: bool = False,
    offers: Collection[Need] = ALWAYS_OFFERED,
    **facts: Any,
) -> Method:
    """The row `name` with `overrides` of its columns, checked against the run it shall train in.

    An override is a rule's name, a table of options, or both; see `rules`. `offers` says what wire, scorers and trainer supply beyond
    what every run has; `facts` are further ones of `RunFacts`. Raises `ConfigError` for an unknown name (with the nearest known one) and
    for every refused combination, all of them in one message.
    """
    supplied = frozenset(offers) | ALWAYS_OFFERED | ({Need.CRITIC} if has_critic else set())
    return _checked(name, overrides or {}, run=RunFacts(group_size=group_size, offers=supplied, **facts))


def _checked(name: str, overrides: Mapping[str, Any], *, run: RunFacts) -> Method:
    if name not in METHODS:
        raise ConfigError(f"algorithm.name: no method named {name!r}{nearest(name, METHODS)}. Methods: {', '.join(METHODS)}.")
    method = with_columns(METHODS[name], overrides)
    problems = problems_of(method, run=run)
    if problems:
        raise ConfigError(f"algorithm {name!r} cannot run here:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return method
