"""An environment: a user's function that says what the model sees next, called in a worker as reward functions are.

    def reply(prompt: str, turns: list[str], **columns) -> str | tuple[str, str] | None

`turns` holds what the model has said so far, one text for each turn. The function returns the text that follows, None where the episode is
over, or the text and a name of the state it leaves: `gigpo` compares the turns of siblings that answer equal states, by default equal
texts. It is passed the arguments that it names: the row's columns, its `options`, and `replies`, its own earlier texts; `async def` works
too.

It must be a pure function of these. It cannot keep state: each turn may be requested in another process, a turn that was lost is requested
again, and an episode that was lost with an orchestrator is played again from its prompt.

The text is taken as it stands, and tokenised here, once; the function itself must write the markers of a chat template. An exception or a
wrong return value becomes an outcome with a text, and the rollout then fails; no reply is made up in its place.
"""

from __future__ import annotations

import dataclasses
import hashlib
import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np

from pipelinerl.errors import ConfigError
from pipelinerl.messages import Observation, ScorerTask
from pipelinerl.rewards.arguments import Parameters, WrongReturn, by_turns, parameters_of
from pipelinerl.rewards.calls import Component
from pipelinerl.runtime.function_errors import message_of
from pipelinerl.runtime.plugin import load_plugin

SHAPE = "reply(prompt, turns, **columns) -> str | tuple[str, str] | None"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An environment function, ready to be called."""

    name: str
    function: Callable[..., Any]
    parameters: Parameters
    options: dict[str, Any]

    def arguments(self, task: ScorerTask, *, decode: Callable[[list[int]], str]) -> dict[str, Any]:
        """Return the arguments of one call. Raises `DataError` naming a parameter for which the row has no column."""
        said, columns = by_turns(task.completions[0], task.turns[0], decode=decode), task.prompt.columns
        passed = {**columns, **self.options, "prompt": task.prompt.text, "turns": said["turns"]}
        return self.parameters.choose(passed, extra={"replies": said["replies"], "chat": list(task.prompt.chat)}, columns=columns)

    def read(self, returned: Any, *, encode: Callable[[str], list[int]]) -> Observation | None:
        """Return the reply that the function returned. Raises `WrongReturn` where that is none."""
        if returned is None:
            return None
        text, state = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        if not isinstance(text, str) or not isinstance(state, str | None):
            raise WrongReturn(f"returned {reprlib.repr(returned)}, expected a text, a text and the name of a state, or None")
        try:
            token_ids = encode(text)
        except Exception as error:  # a tokenizer may refuse a character in words of its own
            why = f"{type(error).__name__}: {message_of(error)}"
            raise WrongReturn(f"said {reprlib.repr(text)}, which cannot be tokenised: {why}") from error
        if not token_ids:
            raise WrongReturn(f"said {reprlib.repr(text)}, which is no token: return None where the episode is over")
        return Observation(
            token_ids=np.array(token_ids, np.int32), state=_digest("said", text) if state is None else _digest("state", state)
        )


def load_environment(component: Component) -> Environment:
    """Import the function. Raises `ConfigError` where it is missing, cannot be imported or has an unknown signature."""
    what, function = f"environment {component.function}", load_plugin(component.function)
    parameters = parameters_of(function, what=what)
    if "turns" not in parameters.accepts or parameters.is_by_position:
        raise ConfigError(f"{what} takes ({parameters.text}), expected {SHAPE}")
    parameters.refuse_unknown(component.options, what=what)
    return Environment(name=component.name, function=function, parameters=parameters, options=component.options)


def _digest(kind: str, text: str) -> str:
    return f"{kind}:{hashlib.blake2b(text.encode(errors='surrogatepass'), digest_size=16).hexdigest()}"
