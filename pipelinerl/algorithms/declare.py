"""Rules are declared by a decorator, at the function that computes them.

    @advantage(source="OPO arXiv:2505.23585", min_group=2)
    def opo(group: ScoredGroup) -> Float64:
        'R - sum(L R) / sum(L)'

The decorator says which column of a method takes the rule, where it is published and what it asks of the run. The function says the rest:
its name is the rule's, the first paragraph of its docstring the formula, its keyword-only numbers, words and booleans are the options with
their defaults (without one, an option must be stated), and an advantage that gives a list gives one number per token.

All of this is read from the source, which is not run: a loss imports torch, and the orchestrator has none. A decorator returns its
function as it is. Functions of the user's are read in the same way, see `own`.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pipelinerl.algorithms.method import TRAINER_OFFERS, Need, Option
from pipelinerl.errors import ConfigError
from pipelinerl.runtime.plugin import load_plugin

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSpec:
    """Everything known of a rule before it is chosen. As a decorator it leaves the function alone."""

    column: str
    name: str = ""
    """The function's, where nothing else is said."""
    source: str = ""
    """The publication: arXiv ids, libraries."""
    needs: Set[Need] = frozenset()
    needs_if: Mapping[str, Need] = field(default_factory=dict)
    """Need that holds only while the option of this name is not zero."""
    caller_options: Mapping[str, Option] = field(default_factory=dict)
    """Options with their defaults on which the function's caller acts, not the function."""
    min_group: int = 1
    """Fewest scored siblings for which the rule means anything."""
    level: str = "token"
    """The unit that a weight, a mask or a batch rule decides about: "token", or "sequence" (also segments)."""
    proximal: Set[str] = frozenset()
    """Proximal policies under which the rule means what its name says; empty: any."""
    aggregations: Set[str] = frozenset()
    """Aggregations under which the rule means what its name says; empty: any."""
    allows_stopped: bool = False
    """An advantage rule that stays unbiased where siblings were stopped early by a coin, and the others weigh more."""
    has_memory: bool = False
    """An advantage rule that gives other numbers when it is asked once more."""
    divides_by_mean: bool = False
    """An advantage rule that divides by the mean reward, which must not be below 0."""
    reads_mu: bool = False
    """It sees how far the trainer's policy is from the engine's by more than the proximal policy: a weight, most masks."""
    reads_advantages: bool = True
    """False for an objective that brings its own signal."""
    has_own_term: bool = False
    """An objective with a term beside its product with the advantage, which is there where the advantage is 0."""
    is_linear: bool = False
    """An objective that is linear in the advantage, so that an expectation over advantages passes through it."""
    idle_at_one: Mapping[str, str] = field(default_factory=dict)
    """Options that bound nothing from 1 on, each with what it bounds: a "ratio" from below, or a change of "probability"."""
    returns: str = ""
    """The function beside an advantage rule of a critic that gives, for the same group and options, what its values are trained towards."""
    step_statistic: str = ""
    """The function of `loss.step_statistics` that measures for the rule, over a whole step, what it reads of `Terms.known`."""
    is_own: bool = False
    """It is a function of the user's, see `own`: its options are bound by nothing but their kind."""
    formula: str = ""
    reference: str = ""
    """`module:function`; empty for the rule "none" of a column, which has no function."""
    parameters: tuple[str, ...] = ()
    """Names of what the function reads."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """Options with their published defaults."""
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Allowed values of the options that are words."""
    per_token: bool = False
    """An advantage rule that gives each token a number of its own, not one to the whole sequence."""

    def __call__(self, function: Function) -> Function:
        return function

    @property
    def compares_proximal(self) -> bool:
        """Say whether the rule measures how far pi is from the proximal policy, and does nothing where the two are one."""
        return "recomputed" in self.proximal and "current" not in self.proximal

    @property
    def on_trainer(self) -> bool:
        """Say whether it is an advantage rule whose inputs exist only in the trainer, once the step is whole."""
        return self.column == "advantage" and bool(self.needs & TRAINER_OFFERS)

    def needs_with(self, options: Mapping[str, Option]) -> frozenset[Need]:
        """Give what the rule reads beyond what every run has, with its options filled in."""
        return frozenset(self.needs | {need for option, need in self.needs_if.items() if options[option]})

    def call(self, *arguments: Any, options: Mapping[str, Option]) -> Any:
        """Call the function; its file is imported, once."""
        return load_rule(self.reference)(*arguments, **{name: options[name] for name in options if name not in self.caller_options})


MOVED = frozenset({"engine", "recomputed", "loglinear"})
"""The proximal policies of rules that compare pi with prox: with "current" the two are equal, and the rule would never act."""
UNLIKE_ENGINE = frozenset({"current", "recomputed", "loglinear"})
"""Proximal policies of weights from rho: with prox = mu the ratio already carries the whole correction; a weight would count it twice."""

shaping = partial(RuleSpec, column="shaping")
"""`(group) -> group` with other rewards."""
group_filter = partial(RuleSpec, column="group_filter", min_group=2, caller_options={"refill": 10})
"""`(group) -> bool`, whether the group trains. `refill` bounds a step to so many batches' worth of groups; then groups train although the
filter would set them aside: the step never starves, and a step without signal does no harm."""
advantage = partial(RuleSpec, column="advantage")
"""`(group) -> [N]`, or N arrays [P]."""
batch = partial(RuleSpec, column="batch", needs=frozenset({Need.WHOLE_BATCH}))
"""`(credits, groups) -> credits` of a whole step."""
objective = partial(RuleSpec, column="objective", proximal=MOVED)
"""`(terms) -> Loss`. Most compare pi with prox; one whose ratio is pi / mu by definition says `proximal={"engine"}`."""
proximal = partial(RuleSpec, column="proximal")
"""`(columns, current, behaviour) -> [T]`, log prox."""
weight = partial(
    RuleSpec,
    column="weight",
    proximal=UNLIKE_ENGINE,
    reads_mu=True,
    caller_options={"batch_normalize": False},
    needs_if={"batch_normalize": Need.WHOLE_STEP},
)
"""`(terms) -> [T]`, detached. `batch_normalize` divides the weights by their mean over the step, so that it is 1: over all trained tokens,
or, for weights of whole sequences, over these; of all rows and ranks, at the policy that the step begins with, before any mask (verl
rollout_is_batch_normalize)."""
mask = partial(RuleSpec, column="masks", reads_mu=True)
"""`(terms) -> [T] bool`, true where the token is kept."""
kl = partial(
    RuleSpec,
    column="kl",
    source="verl; target as arXiv:1909.08593, verl",
    needs=frozenset({Need.REFERENCE_LOGPROBS}),
    caller_options={"final": 0.0, "fade_steps": 0, "target": 0.0, "horizon": 10_000},
)
"""`(terms) -> [T]`, which the loss multiplies by `beta`. Beta moves in a straight line to `final`, which it has from step `fade_steps` on;
with 0 steps it stays as it is. With a `target` above 0 it follows the KL instead, its mean over sequences of the mean over their tokens by
this very estimator, before beta: see `controllers`. Horizon and target as verl's kl_ctrl; a smaller horizon follows faster, and is refused
where a step could turn beta over."""
auxiliary = partial(RuleSpec, column="auxiliary")
"""`(terms) -> [T]`, with gradient."""
critic = partial(RuleSpec, column="critic")
"""A loss of the model that is trained beside the policy: `(outputs, ...) -> (sum, number of clipped, or of right ones)`."""

DECORATORS = {name: kind for name, kind in globals().items() if isinstance(kind, partial)}
"""The decorators above, by name."""

load_rule = functools.cache(load_plugin)
"""The function that a reference names; its file is run, once."""


def declared_in(module: str) -> Iterator[RuleSpec]:
    """Every rule that a module of this package declares, in the order of its source."""
    tree = ast.parse(Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py").read_text())
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        for decorator in function.decorator_list:
            if isinstance(decorator, ast.Call) and (kind := DECORATORS.get(ast.unparse(decorator.func))):
                said = kind(**{str(word.arg): ast.literal_eval(_Needs().visit(word.value)) for word in decorator.keywords})
                yield read_function(function, replace(said, reference=f"{__package__}.{module}:{function.name}"))  # pyright: ignore[reportArgumentType]


def read_function(function: ast.FunctionDef, said: RuleSpec) -> RuleSpec:
    """The spec with what the function itself says. Raises `ConfigError` where it takes anything, or a default is no plain value."""
    arguments = function.args
    if (anything := arguments.vararg or arguments.kwarg) is not None:
        raise ConfigError(f"{said.reference} takes anything by *{anything.arg}: name what it reads, and after a bare * its options")
    parameters = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    options: dict[str, Option] = {}
    choices: dict[str, tuple[str, ...]] = {}
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        annotation = argument.annotation
        if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
            choices[argument.arg] = tuple(ast.literal_eval(annotation.slice))
        elif not said.is_own and (annotation is None or ast.unparse(annotation) not in _OPTION_KINDS):
            parameters.append(argument.arg)
            continue
        options[argument.arg] = None if default is None else _plain(default, option=argument.arg, reference=said.reference)
    return replace(
        said,
        name=said.name or function.name,
        formula=" ".join((ast.get_docstring(function) or "").split("\n\n")[0].split()),
        parameters=tuple(parameters),
        options=options | dict(said.caller_options),
        choices=choices,
        per_token=said.column == "advantage" and ast.unparse(function.returns or ast.Constant(None)).startswith("list["),
    )


_OPTION_KINDS = ("float", "int", "bool", "str")
"""Annotations of options; anything else that a rule of ours takes by keyword is an input."""


class _Needs(ast.NodeTransformer):
    """Reads `Need.NAME` as the need of that name; everything else that a decorator is told is a literal."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.Constant:
        return ast.Constant(Need[node.attr])  # pyright: ignore[reportArgumentType]


def _plain(default: ast.expr, *, option: str, reference: str) -> Option:
    try:
        value = ast.literal_eval(default)
    except ValueError:
        value = ast
    if value is None or isinstance(value, float | int | bool | str):
        return value
    raise ConfigError(f"{reference}: option {option} has the default {ast.unparse(default)}, expected a number, text, true or false")
