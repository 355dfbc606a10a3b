"""Combinations that are refused before a run starts, because they would train on something else than their names say.

What one rule demands is declared at its function (`declare`) and held against the run here; the other checks are about rules that do not
go together. Each is a generator function that yields sentences; `problems_of` collects them all, so that a user sees every problem at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipelinerl.algorithms.controllers import MAX_ERROR, controlled_entropy, controlled_kl
from pipelinerl.algorithms.method import CRITICS, ORCHESTRATOR_KNOWS, Aggregation, Method, Need, Option
from pipelinerl.algorithms.rules import COLUMNS, Chosen, makes_advantages_in_trainer, spec_of, specs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts of the run around the algorithm."""

    group_size: int
    offers: frozenset[Need]
    """Needs that the messages, scorers and trainer supply."""
    samples_per_step: int | None = None
    """Sequences of one step; None where that is not known."""
    max_staleness: int | None = None
    """K of the run; None where none bounds it."""
    epochs: int = 1
    stops_early: bool = False
    """Rollouts may be stopped early, by a coin."""
    compares_siblings: bool = False
    """A reward function compares the rollouts of a group."""
    may_branch: bool = False
    """Rollouts may be episodes that branch."""


EARLY_STOP = "prm.early_stop.threshold or rollout.cut_after"
"""The settings that have rollouts stopped early."""
_WAYS_OUT = " Set proximal to engine and weight to none, or, to keep the weight, objective to gpg, which has no trust region."
_JUDGED = {Need.CRITIC: "values", Need.IMPLICIT_PRM: "process rewards"}


def problems_of(method: Method, *, run: RunFacts) -> list[str]:
    """One sentence per reason to refuse the method in this run; empty when it may start."""
    of_rules = (_unstated, _missing, _small_group, _wrong_proximal, _first_pass_only, _aggregation, _bounds, _stopped_rule)
    of_methods = (
        _unordered_masks,
        _normalized,
        _unread,
        _unlike,
        _controlled,
        _made_in_trainer,
        _withheld,
        _stopped,
        _compared,
        _branching,
    )
    found = [problem for check in of_rules for chosen in specs_of(method) for problem in check(chosen, method, run)]
    return found + [problem for check in of_methods for problem in check(method, run)]


def needs_several_epochs(method: Method) -> bool:
    """Say whether the method compares the policy with itself, until a second epoch of the same step."""
    return method.proximal.name == "recomputed" and any(spec.compares_proximal for _, _, spec in specs_of(method))


def _unstated(chosen: Chosen, method: Method, run: RunFacts) -> Iterator[str]:
    for option, value in chosen.rule.options.items():
        if value is None:
            yield f"{chosen} has no default for {option}: got nothing, expected a number. Set algorithm.{chosen.column}.{option}."


def _missing(chosen: Chosen, method: Method, run: RunFacts) -> Iterator[str]:
    for need in sorted(chosen.spec.needs_with(chosen.rule.options) - run.offers):
        yield f"{chosen} needs {need}, which this run does not offer{need.remedy and f': {need.remedy}'}."


def _small_group(chosen: Chosen, method: Method, run: RunFacts) -> Iterator[str]:
    if run.group_size < chosen.spec.min_group:
        yield (
            f"{chosen} compares siblings: got group size {run.group_size}, expected at least {chosen.spec.min_group}."
            " Raise the group size, or choose remax or reinforce_pp."
        )


def _wrong_proximal(chosen: Chosen, method: Method, run: RunFacts) -> Iterator[str]:
    proximal, wanted = method.proximal.name, chosen.spec.proximal
    if not wanted or proximal in wanted:
        return
    expected = f"got proximal {proximal!r}, expected {' or '.join(sorted(wanted))}"
    if chosen.column == "weight":
        yield (
            f"{chosen} with proximal 'engine' would count pi/mu twice, since the ratio already is pi/mu: {expected}."
            " Set weight to none, or use another proximal policy."
        )
    elif proximal == "current":
        ways_out = _WAYS_OUT if chosen.column == "objective" else ""
        yield f"{chosen} compares pi with the proximal policy, and 'current' makes them equal: it would never act; {expected}.{ways_out}"
    else:
        yield f"{chosen} is defined against another proximal policy: {expected}."


def _first_pass_only(chosen: Chosen, method: Method, run: RunFacts) -> Iterator[str]:
    """The policy at the start of a step is the one being trained until its first update, so in a single epoch nothing has moved."""
    if method.proximal.name == "recomputed" and run.epochs == 1 and chosen.spec.compares_proximal:
        yield (
            f"{chosen} compares pi with the policy at the start of the step, and in a single epoch of a step the two are one: it would"
            " never act. Set trainer.epochs to 2 or more, or algorithm.overrides.proximal to 'engine' (weight none) or 'loglinear'."
        )


def _aggregation(chosen: Chosen, method: Method, run: RunFacts) -> Iterator[str]:
    wanted = chosen.spec.aggregations
    if wanted and method.aggregation not in wanted:
        yield f"{chosen}: got aggregation {method.aggregation.value!r}, expected {' or '.join(sorted(wanted))}."


def _bounds(chosen: Chosen, method: Method, run: RunFacts) -> Iterator[str]:
    options = chosen.rule.options
    low, high, dual_clip = (number_of(options.get(option)) for option in ("low", "high", "dual_clip"))
    if low is not None and high is not None and low >= high:
        yield f"{chosen} keeps nothing: got low {options['low']} and high {options['high']}, expected low below high."
    if chosen.column == "objective" and dual_clip is not None and 0 < dual_clip <= 1:
        yield f"{chosen}: got dual_clip {dual_clip}, expected 0 (off) or more than 1. The usual value is 3."


def _stopped_rule(chosen: Chosen, method: Method, run: RunFacts) -> Iterator[str]:
    """A rule that compares those who were not stopped makes the estimate depend on the coins."""
    if run.stops_early and chosen.column == "advantage" and not chosen.spec.allows_stopped:
        yield (
            f"{EARLY_STOP} stops siblings early, and {chosen} would compare the others only: the estimate would be biased."
            " Choose rloo_doubly_robust (algorithm rloo_early_stop) or step_reinforce."
        )
    if run.stops_early and chosen.column in ("group_filter", "batch") and chosen.rule.name != "none":
        yield f"{EARLY_STOP} stops siblings early, and {chosen} would judge by the others only. Set {chosen.column} to none."


def _unordered_masks(method: Method, run: RunFacts) -> Iterator[str]:
    levels = {column: {spec.level for c, _, spec in specs_of(method) if c == column} for column in ("weight", "masks")}
    if "sequence" in levels["weight"] and "token" in levels["masks"] and method.mask_order == "unstated":
        yield (
            f"weight {method.weight.name} multiplies over a sequence and a token mask removes tokens of it: got no order, expected"
            " algorithm.mask_order = 'before_weight' (removed tokens leave the product) or 'after_weight' (they stay in it)."
        )


def _normalized(method: Method, run: RunFacts) -> Iterator[str]:
    if method.weight.options.get("batch_normalize") and method.masks and method.mask_order == "before_weight":
        yield (
            f"weight {method.weight.name} with batch_normalize is divided by the mean of all weights of the step: got mask_order"
            " 'before_weight', expected 'after_weight' (masks then reject what was weighed)."
        )


def _unread(method: Method, run: RunFacts) -> Iterator[str]:
    """Refuse rules whose output no other rule reads."""
    specs = {column: spec for column, _, spec in specs_of(method)}
    objective, advantage = method.objective.name, method.advantage.name
    if specs["objective"].reads_advantages and advantage == "none" and method.kl.name == "none" and not method.auxiliary:
        yield f"objective {objective} multiplies advantages, and advantage none makes them 0: nothing would train. Choose an advantage."
    if not specs["objective"].reads_advantages and advantage != "none":
        yield f"objective {objective} brings its own signal: got advantage {advantage!r}, which it would not read, expected none."
    if Need.DIVERGENCE in specs["objective"].needs and Need.DIVERGENCE in specs["kl"].needs:
        yield f"objective {objective} and kl {method.kl.name} are both the divergence from one teacher. Set kl to none."
    reads, loss_mask = specs["advantage"].needs & CRITICS, specs["critic"].needs & CRITICS
    for need in reads - loss_mask:
        wanted = next(name for name, spec in COLUMNS["critic"].items() if need in spec.needs)
        yield f"advantage {advantage} reads {_JUDGED[need]}: got critic {method.critic.name!r}, which trains none, expected {wanted}."
    for need in loss_mask - reads:
        yield f"critic {method.critic.name} trains {_JUDGED[need]} that advantage {advantage} does not read. Set critic to none."


def _unlike(method: Method, run: RunFacts) -> Iterator[str]:
    """Rules that are not defined on what the rule before them gives."""
    specs = {column: spec for column, _, spec in specs_of(method)}
    if specs["batch"].level == "sequence" and specs["advantage"].per_token:
        yield (
            f"batch {method.batch.name} counts one advantage per sequence, and advantage {method.advantage.name} gives one per token."
            " Choose whiten_tokens."
        )
    advantage = method.advantage.name
    if specs["advantage"].has_memory and method.batch.name != "none":
        yield f"batch {method.batch.name} asks for advantages once more, and {advantage}'s baselines have moved by then. Set batch to none."
    if specs["advantage"].divides_by_mean and method.shaping:
        names = ", ".join(rule.name for rule in method.shaping)
        divides = f"advantage {advantage} divides by the mean reward, which shaping can push below 0"
        yield f"{divides}: got {names}, expected none. Choose dr_grpo."


def _controlled(method: Method, run: RunFacts) -> Iterator[str]:
    """Coefficients that follow a measurement, where two laws would move them, or one would move them out of their range."""
    kl, entropy = controlled_kl(method), controlled_entropy(method)
    for column, rule in (("kl", kl), ("auxiliary", entropy)):
        if rule is not None and rule.options.get("fade_steps"):
            yield (
                f"{column} {rule.name}: fade_steps moves its coefficient on a line, and target has it follow a measurement: got both,"
                " expected one of them. Set the other to 0."
            )
    if kl is not None and run.samples_per_step is not None:
        least, horizon = MAX_ERROR * run.samples_per_step, kl.options["horizon"]
        if (number_of(horizon) or math.inf) <= least:
            yield (
                f"kl {kl.name}: one step of {run.samples_per_step} sequences could take all of beta away: got horizon {horizon}, expected"
                f" more than {least:g}. The usual value is 10000."
            )
    if entropy is not None and not _in_order([entropy.options[name] for name in ("min_coef", "coef", "max_coef")]):
        yield (
            f"auxiliary {entropy.name}: got coef {entropy.options['coef']}, expected one from min_coef {entropy.options['min_coef']} to"
            f" max_coef {entropy.options['max_coef']}, within which it follows the entropy."
        )


def _in_order(values: Sequence[Option]) -> bool:
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return len(numbers) < len(values) or numbers == sorted(numbers)


def _made_in_trainer(method: Method, run: RunFacts) -> Iterator[str]:
    if not makes_advantages_in_trainer(method):
        return
    for column, rule, spec in specs_of(method):
        for need in sorted(spec.needs & run.offers & ORCHESTRATOR_KNOWS if column in ("shaping", "advantage") else ()):
            yield (
                f"{column} {rule.name} needs {need.value}, which only the orchestrator knows, and this method's advantages are made in the"
                " trainer, which alone has critic and reference. Choose another advantage, or no KL in the reward."
            )


def _withheld(method: Method, run: RunFacts) -> Iterator[str]:
    bound = method.withhold_bound
    if bound is not None and run.max_staleness is not None and bound > run.max_staleness:
        yield (
            f"masks version_withhold would let tokens train that are {bound} versions old, and the run's staleness bound is"
            f" {run.max_staleness}: got bound {bound}, expected at most {run.max_staleness}."
        )


def _stopped(method: Method, run: RunFacts) -> Iterator[str]:
    """A method that measures those who were not stopped, or divides by them, makes the estimate depend on the coins, too."""
    if not run.stops_early:
        return
    if Need.WHOLE_STEP in method.needs:
        yield (f"{EARLY_STOP} stops rollouts early, and this method measures whole steps, by those that were not stopped. Choose another.")
    objective, advantage = spec_of("objective", method.objective.name), spec_of("advantage", method.advantage.name)
    if not objective.is_linear and objective.reads_advantages and Need.PREDICTIONS in advantage.needs:
        yield (
            f"{EARLY_STOP} stops rollouts early: the expectation of advantage {method.advantage.name} over the coins is what"
            f" stays, and objective {method.objective.name} is not linear in it: the estimate would be biased."
            " Set objective to gpg, proximal to current."
        )
    if method.aggregation is Aggregation.TOKEN_MEAN:
        yield (
            f"{EARLY_STOP} stops rollouts early, and aggregation token-mean divides by tokens, which the coins change. Choose an"
            " aggregation that divides by rollouts started: seq-mean-token-sum-norm, seq-mean-token-sum or seq-mean-token-mean."
        )


def _compared(method: Method, run: RunFacts) -> Iterator[str]:
    if run.compares_siblings and method.adds_greedy:
        yield (
            f"advantage {method.advantage.name} takes the greedy sibling's reward as baseline, and a [[reward]] with per = 'group' makes"
            " that depend on what its siblings sampled: the estimate would be biased. Choose rloo, or a reward per sample."
        )


def _branching(method: Method, run: RunFacts) -> Iterator[str]:
    if run.may_branch and makes_advantages_in_trainer(method):
        yield (
            f"advantage {method.advantage.name} is carried from token to token to the start of a rollout, and [gateway] lends episodes"
            " that may branch: it would pass from one context to another. Choose grpo, rloo or a method of turns (mt_grpo), without a KL"
            " penalty in the reward."
        )


def number_of(value: Option) -> float | None:
    """The option's value where it is a number; one of the user's may be a word, and one may be unstated."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
