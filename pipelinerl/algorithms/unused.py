"""What of a method cannot act in the run at hand, although nothing is wrong with it: said, where `refusals` would refuse.

A sweep may hold a coefficient of 0, and a synchronous baseline a clip that no ratio reaches; but whoever reads the log of a run must not
take them for something that trained. Each check is one generator function of (method, run) that yields "<what> inert: <why>".
"""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.algorithms.method import Method, Option
from pipelinerl.algorithms.refusals import RunFacts
from pipelinerl.algorithms.rules import specs_of

_UP_TO_ONE: dict[str, tuple[str, ...]] = {
    "probability_band": ("high",),
    "dppo_tv": ("clip_low", "clip_high"),
    "prime_rl": ("clip_low", "clip_high"),
    "ipo": ("threshold",),
    "opd": ("threshold",),
}
"""Bounds on a change of probability, which is never more than 1."""
_LOWER_WIDTH = ("clip", "cispo", "clip_cov")
"""Objectives whose ratio is bounded from below by 1 - clip_low."""
_OF_TARGET = ("horizon", "delta", "min_coef", "max_coef")
"""Options that say how a coefficient follows its target."""


def inert_parts(method: Method, *, run: RunFacts) -> list[str]:
    """One line for each part of a method that cannot act in this run; empty where all of it can."""
    checks = (_fresh, _zero, _unreachable, _unread_options, _ages, _order)
    return [line for check in checks for line in check(method, run)]


def _fresh(method: Method, run: RunFacts) -> Iterator[str]:
    """With K = 0 and one pass, a step is trained by the very policy that sampled it: pi / mu is 1 but for rounding."""
    if run.max_staleness != 0 or run.epochs > 1:
        return
    for column, rule, spec in specs_of(method):
        if spec.compares_proximal or spec.proximal == {"engine"} or spec.reads_mu:
            yield (
                f"{rule.name} inert: with a staleness bound of 0 and one pass, pi is the policy that sampled, and {column} {rule.name} sees"
                " rounding alone"
            )


def _zero(method: Method, run: RunFacts) -> Iterator[str]:
    for column, rule, _ in specs_of(method):
        strength = {"kl": "beta", "auxiliary": "tau" if rule.name == "squared_log_ratio" else "coef", "shaping": "coef"}.get(column, "")
        options = rule.options
        begins_at_zero = bool(options.get("final") and options.get("fade_steps")) or (column == "auxiliary" and options.get("target"))
        if strength in options and options[strength] == 0 and not begins_at_zero:
            yield f"{rule.name} inert: algorithm.overrides.{column}.{strength} is 0; set {column} to none to save what it reads"
    if method.objective.options.get("beta") == 0 or method.objective.options.get("tau") == 0:
        yield f"log ratio of {method.objective.name} inert: its coefficient is 0"


def _unreachable(method: Method, run: RunFacts) -> Iterator[str]:
    for _, rule, _ in specs_of(method):
        for option in _UP_TO_ONE.get(rule.name, ()):
            if _at_least(rule.options[option], 1.0):
                yield f"{option} of {rule.name} inert: a probability changes by at most 1"
        if rule.name in _LOWER_WIDTH and _at_least(rule.options["clip_low"], 1.0):
            yield f"clip_low of {rule.name} inert: no ratio is below 0"


def _unread_options(method: Method, run: RunFacts) -> Iterator[str]:
    for _, rule, spec in specs_of(method):
        if rule.options.get("final") and not rule.options.get("fade_steps"):
            yield f"final of {rule.name} inert: fade_steps is 0, so the coefficient stays as it is"
        if rule.options.get("target") == 0:
            unread = [name for name in _OF_TARGET if name in rule.options and rule.options[name] != spec.options[name]]
            if unread:
                yield f"{', '.join(unread)} of {rule.name} inert: target is 0, so the coefficient follows nothing"
        if rule.options.get("divide_by_std") is False:
            unread = [name for name in ("eps", "ddof") if rule.options.get(name) != spec.options.get(name)]
            if unread:
                yield f"{', '.join(unread)} of {rule.name} inert: divide_by_std is false"
    reads_prox = any(spec.proximal for column, _, spec in specs_of(method) if column in ("objective", "weight", "masks"))
    if method.proximal.name in ("recomputed", "loglinear") and not reads_prox and method.kl.name != "unbiased":
        yield f"proximal {method.proximal.name} inert: neither objective {method.objective.name} nor a weight or mask reads it"


def _ages(method: Method, run: RunFacts) -> Iterator[str]:
    """Rules that look at versions, where the bound K leaves them nothing to see."""
    bound = run.max_staleness
    if bound is None:
        return
    if method.withhold_bound == bound:
        yield f"version_withhold inert: the run's staleness bound of {bound} lets no older token into a batch"
    if bound == 0 and any(rule.name == "partial_rollout" for rule in method.masks):
        yield "partial_rollout inert: with a staleness bound of 0 no sequence has tokens of two versions"
    lag = method.proximal.options.get("prox_lag")
    if method.proximal.name == "loglinear" and _at_least(lag, bound):
        yield f"loglinear inert: with a staleness bound of {bound} no token is older than prox_lag {lag}, and prox is mu for all of them"


def _order(method: Method, run: RunFacts) -> Iterator[str]:
    has_weight = any(column == "weight" and spec.level == "sequence" for column, _, spec in specs_of(method))
    if method.mask_order != "unstated" and not (has_weight and method.masks):
        yield f"mask_order inert: it orders masks and a weight over whole sequences, and weight is {method.weight.name}"


def _at_least(value: Option, bound: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= bound
