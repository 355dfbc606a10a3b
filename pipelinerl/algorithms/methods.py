"""METHODS, the table of training methods, and `resolve`, which gives the one method a run uses.

A row changes columns of `START`; everything else stays as there. A new method is one more `_row`. Where a rule of that name does not
exist yet, it is one entry in `orchestrator_rules` or `trainer_rules` and one function on the side that runs it.

Rows whose trust region is drawn around `prox` mostly choose proximal "engine": with one update per batch (`trainer.passes`), the region
around the current policy would be a point, the ratio 1, and the clip inert. The `grpo` row keeps "current" and corrects with an
importance weight, which is exact and costs no forward pass; with several updates it takes "recomputed".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from pipelinerl.algorithms.method import ALWAYS_OFFERED, COSTS, REFERENCE_OFFERS, TRAINER_OFFERS, Aggregation, Method, Need
from pipelinerl.algorithms.refusals import RunFacts, problems_of
from pipelinerl.algorithms.rules import COLUMNS, nearest, with_columns
from pipelinerl.config import Config
from pipelinerl.errors import ConfigError

METHODS: dict[str, Method] = {}

START = with_columns(
    Method(name="start", formula="", source=""),
    {"advantage": "grpo", "objective": "clip", "proximal": "current", "weight": "tis_token", "aggregation": "token-mean"},
)

_ENGINE: dict[str, Any] = {"proximal": "engine", "weight": "none"}
"""Two policies: the ratio is pi / mu and carries the whole correction."""


def _row(name: str, formula: str, source: str, **columns: Any) -> None:
    METHODS[name] = with_columns(dataclasses.replace(START, name=name, formula=formula, source=source), columns)


# --- group baselines -------------------------------------------------------------------------------------------------------------

_row(
    "grpo", "min(rho, 2) * clipped ratio * (R - mean)/(std + 1e-6), token mean", "arXiv:2402.03300, token mean as TRL and verl, TIS as verl"
)
_row(
    "grpo_deepseekmath",
    "grpo as published: mean over sequences of token means, + 0.04 k3",
    "arXiv:2402.03300",
    aggregation="seq-mean-token-mean",
    kl="k3",
)
_row("grpo_dual_clip", "grpo; where A < 0 the loss is at most 3 |A|", "arXiv:1912.09729; verl", objective={"dual_clip": 3.0}, **_ENGINE)
_row(
    "dr_grpo",
    "R - mean, no std; token sums over a constant length",
    "arXiv:2503.20783",
    advantage="dr_grpo",
    aggregation="seq-mean-token-sum-norm",
)
_row(
    "dapo",
    "grpo with clip 0.2 / 0.28, token mean, groups of equal rewards set aside",
    "arXiv:2503.14476",
    objective={"clip_high": 0.28},
    group_filter="zero_variance",
)
_row("rloo", "R - mean of the other siblings", "arXiv:2402.14740", advantage="rloo")
_row(
    "rloo_early_stop",
    "rloo under an unbiased early stop; token sums over a constant length, per rollout started",
    "this project",
    advantage="rloo_doubly_robust",
    aggregation="seq-mean-token-sum-norm",
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
_row("grpo_passk", "only the best sibling is reinforced, by its lead", "verl", advantage="passk")
_row("maxrl", "(R - mean) / mean: harder prompts weigh more", "prime-rl", advantage="maxrl")
_row("gpg", "-alpha A log pi", "arXiv:2504.02546", advantage="dr_grpo", batch="gpg_alpha", objective="gpg")
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
_row("hierarchical_grpo", "grpo at every level of nested groups", "prime-rl", advantage="hierarchical_grpo")
_row("otb", "variance-optimal baseline per token position", "verl", advantage="otb")

# --- steps and turns -------------------------------------------------------------------------------------------------------------

_row("process_grpo", "step scores normalised in the group; a token gets the steps that follow", "arXiv:2402.03300", advantage="step_grpo")
_row("step_difference", "credit is the rise of the step score, + outcome", "potential-based shaping", advantage="step_difference")
_row("step_min", "credit is the worst score still to come, + outcome", "arXiv:2504.15275", advantage="step_min")
_row("step_reinforce", "discounted return per step", "ROLL", advantage="step_reinforce")
_row("gigpo", "group advantage + advantage among equal states", "arXiv:2505.10978", advantage="gigpo")
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
    "clipped ratio * whitened GAE, value function trained beside",
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
    **_ENGINE,
)
_row("cispo", "-sg[clip(r)] A log pi: clipped tokens keep a gradient", "arXiv:2506.13585", objective="cispo", **_ENGINE)
_row("sapo", "sigmoid gate instead of a clip", "arXiv:2511.20347", objective="sapo", aggregation="seq-mean-token-mean", **_ENGINE)
_row("gmpo", "geometric mean of clamped ratios", "arXiv:2507.20673", objective="gmpo", aggregation="seq-mean-token-mean", **_ENGINE)
_row("dppo_tv", "masked by the change of probability, not of ratio", "DPPO; verl", objective="dppo_tv", **_ENGINE)
_row("dppo_kl", "masked by binary KL when moving away; state the threshold", "DPPO; verl", objective="dppo_kl", **_ENGINE)
_row("prime_rl", "-keep A pi/mu + 1e-3 (log pi/mu)^2", "prime-rl", objective="prime_rl", auxiliary="squared_log_ratio", **_ENGINE)
_row("ipo", "prime_rl with keep = |pi - mu| <= threshold; state it", "prime-rl", objective="ipo", auxiliary="squared_log_ratio", **_ENGINE)
_row("opd", "distillation: A = log ref - log pi", "prime-rl", advantage="none", objective="opd", auxiliary="squared_log_ratio", **_ENGINE)
_row(
    "topr",
    "negatives weighted by the clipped ratio of the trajectory",
    "arXiv:2503.14286",
    objective="topr",
    aggregation="seq-mean-token-sum",
    **_ENGINE,
)
_row("topr_token", "topr with the ratio of each token", "ROLL", objective="topr_token", **_ENGINE)
_row("kimi", "-A log pi + tau/2 (log r)^2; state tau", "arXiv:2501.12599", advantage="dr_grpo", objective="kimi", **_ENGINE)
_row("dro", "-(A log pi - beta/2 (log r)^2); state beta", "verl", advantage="dr_grpo", objective="dro", **_ENGINE)
_row("clip_cov", "clip, and zero for some tokens of high covariance", "arXiv:2505.22617", objective="clip_cov", proximal="recomputed")
_row("kl_cov", "KL on the tokens of highest covariance", "arXiv:2505.22617", objective="kl_cov", proximal="recomputed")
_row("reinforce_is", "-sg[min(pi/mu, 5)] A log pi", "PipelineRL arXiv:2509.19128", advantage="rloo", objective="reinforce_is", **_ENGINE)

# --- corrections -----------------------------------------------------------------------------------------------------------------

_row(
    "decoupled_ppo",
    "clip around a recomputed policy, times min(prox/mu, 5)",
    "AReaL arXiv:2505.24298",
    proximal="recomputed",
    weight={"cap": 5.0},
)
_row("loglinear_ppo", "decoupled_ppo, prox interpolated by versions", "AReaL prox_approx", proximal="loglinear", weight={"cap": 5.0})
_row("icepop", "tokens outside 0.5 <= rho <= 5 do not train", "IcePop", weight="icepop")
_row("mis", "tokens with rho > 3 do not train", "MIS", weight="mis_token")
_row(
    "seq_mask_tis",
    "TIS, and sequences whose geometric mean drifts are dropped",
    "NeMo-RL",
    masks={"name": "geo_rs", "low": 0.999, "high": 1.002},
)
_row("opsm", "drop bad answers the policy has already left", "slime; DeepSeek-V3.2", masks="opsm", **_ENGINE)
_row("m2po", "clip around mu, without the tokens of largest second moment", "arXiv:2510.01161", masks="m2po", **_ENGINE)


def method_of(config: Config) -> Method:
    """The method a run's config names, checked against what this system supplies. Raises `ConfigError` as `resolve` does."""
    offers = ALWAYS_OFFERED | TRAINER_OFFERS
    offers |= REFERENCE_OFFERS if config.reference.path is not None else frozenset()
    offers |= {Need.STEP_SCORES} if config.prm.is_used else frozenset()
    offers |= {Need.ANCHORS} if config.environment.function is not None else frozenset()
    offers |= {Need.PREDICTIONS} if config.prm.stop.below is not None else frozenset()
    return resolve(
        config.algorithm.name,
        config.algorithm.overrides,
        group_size=config.rollout.group_size,
        max_staleness=config.pipeline.max_staleness,
        updates_per_batch=config.trainer.passes,
        stops_early=config.prm.stop.below is not None,
        compares_siblings=config.compares_siblings,
        offers=offers,
    )


def resolve(
    name: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    group_size: int,
    has_critic: bool = False,
    offers: Collection[Need] = ALWAYS_OFFERED,
    max_staleness: int | None = None,
    updates_per_batch: int = 1,
    stops_early: bool = False,
    compares_siblings: bool = False,
    truncated_sampling: bool = False,
    replays_kept_tokens: bool = False,
    processed_logprobs: bool = True,
) -> Method:
    """The row `name` with `overrides` of its columns, checked against the run it shall train in.

    An override is a rule's name, a table of options, or both; see `rules`. `offers` says what wire, scorers and trainer supply beyond
    what every run has. Raises `ConfigError` for an unknown name (with the nearest known one) and for every refused combination,
    all of them in one message.
    """
    if name not in METHODS:
        raise ConfigError(f"algorithm.name: no method named {name!r}{nearest(name, METHODS)}. Methods: {', '.join(METHODS)}.")
    method = with_columns(METHODS[name], overrides or {})
    run = RunFacts(
        group_size=group_size,
        offers=frozenset(offers) | ALWAYS_OFFERED | ({Need.CRITIC} if has_critic else set()),
        max_staleness=max_staleness,
        updates_per_batch=updates_per_batch,
        stops_early=stops_early,
        compares_siblings=compares_siblings,
        truncated_sampling=truncated_sampling,
        replays_kept_tokens=replays_kept_tokens,
        processed_logprobs=processed_logprobs,
    )
    problems = problems_of(method, run=run)
    if problems:
        raise ConfigError(f"algorithm {name!r} cannot run here:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return method


def table_rows() -> list[tuple[str, str, str, str]]:
    """(name, formula, cost, source) of every method, in table order; the cost also says what this system does not supply."""
    return [(method.name, method.formula, _cost(method), method.source) for method in METHODS.values()]


def render_table() -> str:
    """The table as aligned text, one method per line, and what its costs mean."""
    rows = [("method", "what it does", "cost", "source"), *table_rows()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=False)) + f"  {row[3]}" for row in rows]
    notes = [f"{need.value}: {meaning}." for need, meaning in COSTS.items()]
    return "\n".join([*lines, "", *notes, "needs X: refused until the run supplies X; the refusal says how, or which option does without."])


def render_rules() -> str:
    """Every rule a column may be overridden with: formula, options with their defaults, source; one per line, by column."""
    lines = []
    for column, table in COLUMNS.items():
        lines += ["", f"{column}:"]
        width = max(map(len, table))
        for name, spec in table.items():
            options = ", ".join(f"{option}={'to be stated' if value is None else value}" for option, value in spec.options.items())
            parts = (spec.formula, f"({options})" if options else "", f"[{spec.source}]" if spec.source else "")
            lines.append(f"  {name:<{width}}  {'  '.join(filter(None, parts))}")
    return "\n".join([*lines, "", f"aggregation: {', '.join(Aggregation)}"])


def _cost(method: Method) -> str:
    missing = sorted(need.value for need in method.needs - ALWAYS_OFFERED - TRAINER_OFFERS - REFERENCE_OFFERS)
    costs = sorted(need.value for need in method.needs if need in COSTS)
    return "; ".join([*costs, *(f"needs {need}" for need in missing)])
