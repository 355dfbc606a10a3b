"""Combinations that are refused before a run starts, because they would train on something else than their names say.

Each check is one generator function of (method, run) that yields sentences; `problems_of` collects them all, so that a user sees every
problem at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipelinerl.algorithms.controllers import MAX_ERROR, controlled_entropy, controlled_kl
from pipelinerl.algorithms.method import CRITICS, ORCHESTRATOR_KNOWS, Aggregation, Method, Need, Option, Rule
from pipelinerl.algorithms.rules import COLUMNS, makes_advantages_in_trainer, spec_of, specs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the run around the algorithm is like."""

    group_size: int
    offers: frozenset[Need]
    """What wire, scorers and trainer supply."""
    samples_per_step: int | None = None
    """Sequences of one step; None where that is not known."""
    max_staleness: int | None = None
    """K of the run; None where none bounds it."""
    updates_per_batch: int = 1
    stops_early: bool = False
    """Rollouts may be stopped early, by a coin."""
    compares_siblings: bool = False
    """A reward function compares the rollouts of a group."""


_HOW_TO_OFFER: dict[Need, str] = {
    Need.COMPONENTS: "give the run several reward functions",
    Need.GREEDY_REWARD: "let the orchestrator add one greedy rollout to every group, or choose rloo",
    Need.STEP_SCORES: "name a process reward model (prm.path, or prm.judge)",
    Need.ANCHORS: "gigpo compares turns that left equal states of an episode of several turns, and a rollout here is one turn, whose only"
    " state is the prompt, among whose siblings it would be grpo; set environment.function, or choose grpo or, with a process reward model,"
    " step_grpo",
    Need.ROLES: "give every prompt's row a column role; or choose rloo",
    Need.PREDICTIONS: "switch unbiased early stopping on (prm.stop.below), or choose rloo",
    Need.CORRECT: "use a reward function that reports correctness",
    Need.TOKEN_KL: "set reference.path, usually to model.path, or kl_coef to 0",
    Need.REFERENCE_LOGPROBS: "set reference.path, to model.path for the policy the run starts from or to a teacher's folder, or kl to none",
    Need.DIVERGENCE: "set reference.path to a teacher's folder, and trainer.parallel.pipeline to 1, where a rank has both output"
    " embeddings; or choose opd, or kl k3, which read the sampled tokens alone",
    Need.OLD_LOGPROBS: "let the trainer run a forward pass before each step, or set proximal to current or engine",
    Need.TOKEN_VERSIONS: "use an engine that tags every token with its version",
    Need.ENTROPY: "let the trainer compute entropies",
    Need.SQUARE_SUM: "let the trainer reduce over the full vocabulary, or choose rloo",
    Need.CRITIC: "give the trainer a critic, or choose a group advantage such as grpo",
    Need.IMPLICIT_PRM: "train an implicit process reward model beside the policy",
    Need.WHOLE_BATCH: "let the orchestrator deliver a step only once all its groups are in",
    Need.WHOLE_STEP: "let the trainer hold a step's rows until it is sealed; training then no longer hides inside generation",
}


_WAYS_OUT = " Set proximal to engine and weight to none, or, to keep the weight, objective to gpg, which has no trust region."

_JUDGED = {Need.CRITIC: "values", Need.IMPLICIT_PRM: "process rewards"}


def problems_of(method: Method, *, run: RunFacts) -> list[str]:
    """One sentence per reason to refuse the method in this run; empty when it may start."""
    checks = (
        _unstated_options,
        _missing_needs,
        _small_group,
        _wrong_proximal,
        _first_pass_only,
        _unordered_masks,
        _normalized,
        _aggregation,
        _unread,
        _unlike,
        _controlled,
        _bounds,
        _made_in_trainer,
        _withheld,
        _stopped,
        _compared,
    )
    return [problem for check in checks for problem in check(method, run)]


def needs_several_passes(method: Method) -> bool:
    """Whether the method compares the policy with itself, until a second pass over the same step."""
    return method.proximal.name == "recomputed" and any(spec.compares_proximal for _, _, spec in specs_of(method))


def _unstated_options(method: Method, run: RunFacts) -> Iterator[str]:
    for column, rule, _ in specs_of(method):
        for option, value in rule.options.items():
            if value is None:
                yield f"{column} {rule.name} has no default for {option}: got nothing, expected a number. Set algorithm.{column}.{option}."


def _missing_needs(method: Method, run: RunFacts) -> Iterator[str]:
    for column, rule, spec in specs_of(method):
        for need in sorted(spec.needs_with(rule.options) - run.offers):
            yield f"{column} {rule.name} needs {need.value}, which this run does not offer: {_HOW_TO_OFFER[need]}."


def _small_group(method: Method, run: RunFacts) -> Iterator[str]:
    for column, rule, spec in specs_of(method):
        if run.group_size < spec.min_group:
            yield (
                f"{column} {rule.name} compares siblings: got group size {run.group_size}, expected at least {spec.min_group}."
                " Raise the group size, or choose remax or reinforce_pp."
            )


def _wrong_proximal(method: Method, run: RunFacts) -> Iterator[str]:
    proximal = method.proximal.name
    for column, rule, spec in specs_of(method):
        if not spec.proximal or proximal in spec.proximal:
            continue
        expected = f"got proximal {proximal!r}, expected {' or '.join(sorted(spec.proximal))}"
        if column == "weight":
            yield (
                f"weight {rule.name} with proximal 'engine' would count pi/mu twice, since the ratio already is pi/mu: {expected}."
                " Set weight to none, or use another proximal policy."
            )
        elif proximal == "current":
            yield (
                f"{column} {rule.name} compares pi with the proximal policy, and 'current' makes them equal: it would never act;"
                f" {expected}."
                f"{_WAYS_OUT if column == 'objective' else ''}"
            )
        else:
            yield f"{column} {rule.name} is defined against another proximal policy: {expected}."


def _first_pass_only(method: Method, run: RunFacts) -> Iterator[str]:
    """The policy at the start of a step is the one being trained until its first update, so in a single pass nothing has moved."""
    if method.proximal.name != "recomputed" or run.updates_per_batch > 1:
        return
    for column, rule, spec in specs_of(method):
        if spec.compares_proximal:
            yield (
                f"{column} {rule.name} compares pi with the policy at the start of the step, and in a single pass over a step the two are"
                " one: it would never act. Set trainer.passes to 2 or more, or algorithm.overrides.proximal to 'engine' (weight none) or"
                " 'loglinear'."
            )


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


def _aggregation(method: Method, run: RunFacts) -> Iterator[str]:
    for column, rule, spec in specs_of(method):
        if spec.aggregations and method.aggregation not in spec.aggregations:
            allowed = " or ".join(sorted(Aggregation(mode).value for mode in spec.aggregations))
            yield f"{column} {rule.name}: got aggregation {method.aggregation.value!r}, expected {allowed}."


def _unread(method: Method, run: RunFacts) -> Iterator[str]:
    """What one rule makes, and no other reads."""
    specs = {column: spec for column, _, spec in specs_of(method)}
    objective, advantage = method.objective.name, method.advantage.name
    if specs["objective"].reads_advantages and advantage == "none" and method.kl.name == "none" and not method.auxiliary:
        yield f"objective {objective} multiplies advantages, and advantage none makes them 0: nothing would train. Choose an advantage."
    if not specs["objective"].reads_advantages and advantage != "none":
        yield f"objective {objective} brings its own signal: got advantage {advantage!r}, which it would not read, expected none."
    if Need.DIVERGENCE in specs["objective"].needs and Need.DIVERGENCE in specs["kl"].needs:
        yield f"objective {objective} and kl {method.kl.name} are both the divergence from one teacher. Set kl to none."
    reads, trains = specs["advantage"].needs & CRITICS, specs["critic"].needs & CRITICS
    for need in reads - trains:
        wanted = next(name for name, spec in COLUMNS["critic"].items() if need in spec.needs)
        yield f"advantage {advantage} reads {_JUDGED[need]}: got critic {method.critic.name!r}, which trains none, expected {wanted}."
    for need in trains - reads:
        yield f"critic {method.critic.name} trains {_JUDGED[need]} that advantage {advantage} does not read. Set critic to none."


def _unlike(method: Method, run: RunFacts) -> Iterator[str]:
    """Rules that are not defined on what the rule before them gives."""
    specs = {column: spec for column, _, spec in specs_of(method)}
    if specs["batch"].level == "sequence" and specs["advantage"].per_token:
        yield (
            f"batch {method.batch.name} counts one advantage per sequence, and advantage {method.advantage.name} gives one per token."
            " Choose whiten_tokens."
        )
    if method.advantage.name == "rae" and method.batch.name != "none":
        yield f"batch {method.batch.name} asks for advantages once more, and rae's baselines have moved by then. Set batch to none."
    if method.advantage.name == "maxrl" and method.shaping:
        names = ", ".join(rule.name for rule in method.shaping)
        yield f"advantage maxrl divides by the mean reward, which shaping can push below 0: got {names}, expected none. Choose dr_grpo."


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
        if _is_number(horizon) and float(horizon) <= least:  # pyright: ignore[reportArgumentType]
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


def _bounds(method: Method, run: RunFacts) -> Iterator[str]:
    for column, rule, _ in specs_of(method):
        low, high = rule.options.get("low"), rule.options.get("high")
        if _is_number(low) and _is_number(high) and low >= high:  # pyright: ignore[reportOperatorIssue, reportOptionalOperand]
            yield f"{column} {rule.name} keeps nothing: got low {low} and high {high}, expected low below high."
    yield from _dual_clip(method.objective)


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
    """Whatever compares rollouts by who was not stopped, or divides by them, makes the estimate depend on the coins."""
    if not run.stops_early:
        return
    for column, rule, spec in specs_of(method):
        if column == "advantage" and not spec.allows_stopped:
            yield (
                f"prm.stop.below stops siblings early, and advantage {rule.name} would compare the others only: the estimate would be"
                " biased. Choose rloo_doubly_robust (algorithm rloo_early_stop) or step_reinforce."
            )
        if column in ("group_filter", "batch") and rule.name != "none":
            yield f"prm.stop.below stops siblings early, and {column} {rule.name} would judge by the others only. Set {column} to none."
    if Need.WHOLE_STEP in method.needs:
        yield "prm.stop.below stops rollouts early, and this method measures whole steps, by those that were not stopped. Choose another."
    objective, advantage = spec_of("objective", method.objective.name), spec_of("advantage", method.advantage.name)
    if not objective.is_linear and objective.reads_advantages and Need.PREDICTIONS in advantage.needs:
        yield (
            f"prm.stop.below stops rollouts early: the expectation of advantage {method.advantage.name} over the coins is what stays, and"
            f" objective {method.objective.name} is not linear in it: the estimate would be biased."
            " Set objective to gpg, proximal to current."
        )
    if method.aggregation is Aggregation.TOKEN_MEAN:
        yield (
            "prm.stop.below stops rollouts early, and aggregation token-mean divides by tokens, which the coins change. Choose an"
            " aggregation that divides by rollouts started: seq-mean-token-sum-norm, seq-mean-token-sum or seq-mean-token-mean."
        )


def _compared(method: Method, run: RunFacts) -> Iterator[str]:
    if run.compares_siblings and method.adds_greedy:
        yield (
            f"advantage {method.advantage.name} takes the greedy sibling's reward as baseline, and a [[reward]] with per = 'group' makes"
            " that depend on what its siblings sampled: the estimate would be biased. Choose rloo, or a reward per sample."
        )


def _dual_clip(objective: Rule) -> Iterator[str]:
    bound = objective.options.get("dual_clip", 0.0)
    if _is_number(bound) and 0 < float(bound) <= 1:  # pyright: ignore[reportArgumentType]
        yield f"objective {objective.name}: got dual_clip {bound}, expected 0 (off) or more than 1. The usual value is 3."


def _is_number(value: Option) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
