"""Parts of a method that cannot act in the run at hand, although nothing is wrong with them: told, where `validation` refuses.

A sweep may hold a coefficient of 0, and a synchronous baseline a clip that no ratio reaches; but whoever reads the log of a run must not
take them for something that trained. Each check is one generator function of (method, run) that yields "<what> unused: <why>".
"""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.algorithms.method import Method
from pipelinerl.algorithms.rules import specs_of
from pipelinerl.algorithms.validation import RunFacts, number_of

_IDLE = {"probability": "a probability changes by at most 1", "ratio": "no ratio is below 0"}
"""Why an option bounds nothing from 1 on, by what it bounds; see `RuleSpec.idle_at_one`."""
_OF_TARGET = ("horizon", "delta", "min_coef", "max_coef")
"""Options that say how a coefficient follows its target."""


def unused_parts(method: Method, *, run: RunFacts) -> list[str]:
    """One line for each part of a method that cannot act in this run; empty where all of it can."""
    checks = (_fresh, _zero, _unreachable, _unread_options, _ages, _order)
    return [line for check in checks for line in check(method, run)]


def _fresh(method: Method, run: RunFacts) -> Iterator[str]:
    """With K = 0 and one epoch, a step is trained by the very policy that sampled it: pi / mu is 1 but for rounding."""
    if run.max_staleness != 0 or run.epochs > 1:
        return
    for column, rule, spec in specs_of(method):
        if spec.compares_proximal or spec.proximal == {"engine"} or spec.reads_mu:
            yield (
                f"{rule.name} unused: with a staleness bound of 0 and one epoch, pi is the policy that sampled, and {column} {rule.name}"
                " sees rounding alone"
            )


def _zero(method: Method, run: RunFacts) -> Iterator[str]:
    for column, rule, _ in specs_of(method):
        strength = {"kl": "beta", "auxiliary": "tau" if rule.name == "squared_log_ratio" else "coef", "shaping": "coef"}.get(column, "")
        options = rule.options
        begins_at_zero = bool(options.get("final") and options.get("fade_steps")) or (column == "auxiliary" and options.get("target"))
        if strength in options and options[strength] == 0 and not begins_at_zero:
            yield f"{rule.name} unused: algorithm.overrides.{column}.{strength} is 0; set {column} to none to save what it reads"
    if method.objective.options.get("beta") == 0 or method.objective.options.get("tau") == 0:
        yield f"log ratio of {method.objective.name} unused: its coefficient is 0"


def _unreachable(method: Method, run: RunFacts) -> Iterator[str]:
    for _, rule, spec in specs_of(method):
        for option, what in spec.idle_at_one.items():
            if (number_of(rule.options[option]) or 0.0) >= 1.0:
                yield f"{option} of {rule.name} unused: {_IDLE[what]}"


def _unread_options(method: Method, run: RunFacts) -> Iterator[str]:
    for _, rule, spec in specs_of(method):
        if rule.options.get("final") and not rule.options.get("fade_steps"):
            yield f"final of {rule.name} unused: fade_steps is 0, so the coefficient stays as it is"
        if rule.options.get("target") == 0:
            unread = [name for name in _OF_TARGET if name in rule.options and rule.options[name] != spec.options[name]]
            if unread:
                yield f"{', '.join(unread)} of {rule.name} unused: target is 0, so the coefficient follows nothing"
        if rule.options.get("divide_by_std") is False:
            unread = [name for name in ("eps", "ddof") if rule.options.get(name) != spec.options.get(name)]
            if unread:
                yield f"{', '.join(unread)} of {rule.name} unused: divide_by_std is false"
    reads_prox = any(spec.proximal for column, _, spec in specs_of(method) if column in ("objective", "weight", "masks"))
    if method.proximal.name in ("recomputed", "loglinear") and not reads_prox and method.kl.name != "unbiased":
        yield f"proximal {method.proximal.name} unused: neither objective {method.objective.name} nor a weight or mask reads it"


def _ages(method: Method, run: RunFacts) -> Iterator[str]:
    """Rules that look at versions, where the bound K leaves them nothing to see."""
    bound = run.max_staleness
    if bound is None:
        return
    if method.withhold_bound == bound:
        yield f"version_withhold unused: the run's staleness bound of {bound} lets no older token into a batch"
    if bound == 0 and any(rule.name == "partial_rollout" for rule in method.masks):
        yield "partial_rollout unused: with a staleness bound of 0 no sequence has tokens of two versions"
    lag = method.proximal.options.get("prox_lag")
    if method.proximal.name == "loglinear" and (number_of(lag) or 0.0) >= bound:
        yield f"loglinear unused: with a staleness bound of {bound} no token is older than prox_lag {lag}, and prox is mu for all of them"


def _order(method: Method, run: RunFacts) -> Iterator[str]:
    has_weight = any(column == "weight" and spec.level == "sequence" for column, _, spec in specs_of(method))
    if method.mask_order != "unstated" and not (has_weight and method.masks):
        yield f"mask_order unused: it orders masks and a weight over whole sequences, and weight is {method.weight.name}"
