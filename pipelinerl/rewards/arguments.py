"""How a user's function, a reward or an environment, is called: by name, with the arguments that its parameters accept."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pipelinerl.errors import ConfigError, DataError
from pipelinerl.messages import Int32, Turns

_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class WrongReturn(Exception):
    """A user's function returned something that it must not; the message says what."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of one function."""

    accepts: frozenset[str]
    """Parameters that can be passed by name."""
    requires: frozenset[str]
    """Parameters among these that have no default."""
    takes_any: bool
    """True where the function has `**columns`."""
    is_by_position: bool
    """True where the function has parameters that cannot be passed by name."""
    text: str
    """The parameters as the signature writes them, for messages."""

    def refuse_unknown(self, options: Mapping[str, Any], *, what: str) -> None:
        """Raise `ConfigError` where one of the options of `what` is no parameter."""
        if not self.takes_any and (unknown := options.keys() - self.accepts):
            raise ConfigError(
                f"{what} has the options {', '.join(sorted(unknown))}, but its parameters are {', '.join(sorted(self.accepts))}"
            )

    def choose(self, passed: Mapping[str, Any], *, extra: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return every argument of `passed` that the function takes, and of `extra` those that it names. Raises `DataError` naming a
        parameter for which the row has no column.
        """
        named = {**extra, **passed}
        if missing := self.requires - named.keys():
            wanted = ", ".join(name + _nearest(name, columns) for name in sorted(missing))
            raise DataError(f"needs {wanted}, but the row has only the columns {', '.join(sorted(columns)) or '(none)'}")
        return {name: value for name, value in named.items() if name in self.accepts or (self.takes_any and name in passed)}


def _nearest(name: str, columns: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, columns, n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def parameters_of(function: Callable[..., Any], *, what: str) -> Parameters:
    """Return the parameters of a function. Raises `ConfigError` where `what` is no Python function."""
    if not callable(function):
        raise ConfigError(f"{what} is a {type(function).__name__}, expected a function")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError as error:
        raise ConfigError(f"{what} does not tell its parameters ({error}): wrap it in a Python function") from None
    by_name = {parameter.name: parameter for parameter in parameters if parameter.kind in _KEYWORD_KINDS}
    return Parameters(
        accepts=frozenset(by_name),
        requires=frozenset(name for name, parameter in by_name.items() if parameter.default is inspect.Parameter.empty),
        takes_any=any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters),
        is_by_position=any(parameter.kind is inspect.Parameter.POSITIONAL_ONLY for parameter in parameters),
        text=", ".join(str(parameter) for parameter in parameters) or "no parameters",
    )


def by_turns(token_ids: Int32, turns: Turns | None, *, decode: Callable[[list[int]], str]) -> dict[str, list[str]]:
    """Return as text the `turns` of the model, and the environment's `replies` to all of them but the last."""
    if turns is None:
        return {"turns": [decode(token_ids.tolist())], "replies": []}
    starts, ends = turns.starts.tolist(), turns.ends.tolist()
    return {
        "turns": [decode(token_ids[start : end + 1].tolist()) for start, end in zip(starts, ends, strict=True)],
        "replies": [decode(token_ids[end + 1 : start].tolist()) for end, start in zip(ends, starts[1:], strict=False)],
    }
