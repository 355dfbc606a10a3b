"""User rules: a loss, a term of it, an advantage, a weight or a mask that a config names as `path:name`.

A function gets what its parameters name; its keyword-only parameters are its options, with their defaults; whatever else it asks for
is refused by name. The source is read and not run: a loss may import torch, and the orchestrator has none. `CARRIED` is the contract,
by column: name, shape and dtype, and what the run must supply for it.

An objective or auxiliary term returns [T] float, the loss of each token; a weight [T] float, which is detached; a mask [T] bool, true where
the token trains; an advantage [N] float, or a list of N arrays [P]. T is at least 1.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelinerl.algorithms.declare import MOVED, UNLIKE_ENGINE, RuleSpec, read_function
from pipelinerl.algorithms.method import Need
from pipelinerl.errors import ConfigError
from pipelinerl.runtime.plugin import load_plugin, nearest


@dataclass(frozen=True, slots=True)
class Carried:
    """Something a function may ask for by the name of a parameter."""

    meaning: str
    """Shape, dtype and unit."""
    need: Need | None = None


_TOKENS: dict[str, Carried] = {
    "logprobs": Carried("[T] float tensor, log pi of the sampled token; with gradient in an objective or auxiliary term"),
    "behaviour_logprobs": Carried("[T] float tensor, log mu, the engine's"),
    "proximal_logprobs": Carried("[T] float tensor, log prox, by the column proximal"),
    "ratio": Carried("[T] float tensor, pi / prox; with gradient in an objective or auxiliary term"),
    "rho": Carried("[T] float tensor, prox / mu; with proximal engine pi / mu without gradient"),
    "advantages": Carried("[T] float tensor"),
    "staleness": Carried("[T] int tensor, versions between the one that sampled the token and the one being trained"),
    "sequences": Carried("the tokens by sequence: its sum, mean and maximum take [T] to [N], its spread takes [N] to [T]"),
    "old_logprobs": Carried("[T] float tensor, log pi at the start of the step", Need.OLD_LOGPROBS),
    "reference_logprobs": Carried("[T] float tensor, of the reference or teacher", Need.REFERENCE_LOGPROBS),
    "entropy": Carried("[T] float tensor, exact, in nats; with gradient in an objective or auxiliary term", Need.ENTROPY),
    "correct": Carried("[T] bool tensor, whether the token's sequence is correct", Need.CORRECT),
    "truncated": Carried("[T] bool tensor, whether it was cut off at its longest length", Need.TRUNCATED),
}
_GROUP: dict[str, Carried] = {
    "rewards": Carried("[N] float64 array, of the scored siblings of one prompt"),
    "lengths": Carried("[N] int64 array, trained tokens"),
    "loss_mask": Carried("N bool arrays [P], by position of the response; false for what a tool or environment said"),
    "components": Carried("[N, K] float64 array, the reward of each component apart", Need.COMPONENTS),
    "component_weights": Carried("[K] float64 array", Need.COMPONENTS),
    "correct": Carried("[N] bool array", Need.CORRECT),
    "greedy_reward": Carried("float, of a greedy rollout of the same prompt", Need.GREEDY_REWARD),
    "steps": Carried("N `StepScores`: ends [K] int64 and scores [K] float64 of each step", Need.STEP_SCORES),
}
CARRIED: Mapping[str, Mapping[str, Carried]] = {
    "advantage": _GROUP,
    "objective": _TOKENS,
    "weight": _TOKENS,
    "masks": _TOKENS,
    "auxiliary": _TOKENS,
}
"""The things that a user's function may ask for, by column. Advantages are numpy, on the orchestrator; the others torch, in the trainer."""
RENAMED = {"trains": "loss_mask"}
"""Earlier name of something that a function may ask for -> its present name."""
COMPARES = frozenset({"ratio", "proximal_logprobs"})
"""Parameters by which an objective compares pi with the proximal policy."""


def is_own(name: str) -> bool:
    """Say whether a rule's name is that of a user's function."""
    return ":" in name


@functools.cache
def spec_of_own(column: str, reference: str) -> RuleSpec:
    """Read what can be known of a user's function before it is called. Raises `ConfigError` naming what it asks for and nothing carries."""
    carried = CARRIED.get(column)
    if carried is None:
        raise ConfigError(f"algorithm.{column}: {reference!r} is a function, and only {', '.join(CARRIED)} take one.")
    spec = read_function(_function(reference), RuleSpec(column=column, name=reference, source=reference, reference=reference, is_own=True))
    for parameter in spec.parameters:
        if parameter not in carried:
            if (renamed := RENAMED.get(parameter)) in carried:
                raise ConfigError(f"algorithm.{column}: {reference} asks for {parameter}, which is now called {renamed}.")
            raise ConfigError(
                f"algorithm.{column}: {reference} asks for {parameter}{nearest(parameter, carried)}, which nothing carries to a function of"
                f" this column. It may ask for {', '.join(carried)}; options of its own stand after a bare *, with a default."
            )
    moved = column == "objective" and COMPARES & set(spec.parameters)
    weighs = column == "weight" and "rho" in spec.parameters
    return dataclasses.replace(
        spec,
        formula=spec.formula or "a function of the user's",
        needs=frozenset(need for parameter in spec.parameters if (need := carried[parameter].need) is not None),
        proximal=MOVED if moved else UNLIKE_ENGINE if weighs else frozenset(),
        reads_mu=column == "weight",
        reads_advantages=column != "objective" or "advantages" in spec.parameters,
    )


def _function(reference: str) -> ast.FunctionDef:
    path, _, name = reference.rpartition(":")
    functions = {node.name: node for node in _tree(path, reference).body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        has = ", ".join(functions) or "no function"
        raise ConfigError(f"{path} defines no function {name!r}{nearest(name, functions)}; it has {has}. A rule is a `def` of the file.")
    return functions[name]


def _tree(path: str, reference: str) -> ast.Module:
    if not path:
        load_plugin(reference)  # says what a reference looks like
    file = Path(path)
    if not path.endswith(".py"):
        try:
            found = importlib.util.find_spec(path)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"module {path} cannot be found: {type(error).__name__}: {error}") from error
        if found is None or found.origin is None:
            raise ConfigError(f"no module {path} (looked along the Python path)")
        file = Path(found.origin)
    if not file.is_file():
        raise ConfigError(f"no Python file at {path} (looked from {Path.cwd()})")
    try:
        return ast.parse(file.read_text())
    except SyntaxError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
