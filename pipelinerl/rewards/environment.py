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

import asyncio
import dataclasses
import hashlib
import inspect
import reprlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pipelinerl.errors import ConfigError
from pipelinerl.messages import Observation, Outcome, ScorerTask
from pipelinerl.rewards.arguments import Parameters, by_turns, parameters_of
from pipelinerl.rewards.calls import Call, CallResult, Component
from pipelinerl.rewards.reward import ERROR_CHARACTERS, describe, wait_for_value
from pipelinerl.runtime.function_errors import FunctionError, error_of, place_of
from pipelinerl.runtime.plugin import load_plugin

SHAPE = "reply(prompt, turns, **columns) -> str | tuple[str, str] | None"


class NotAReply(Exception):
    """An environment returned something that is no reply; the message says what."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An environment function, ready to be called."""

    name: str
    function: Callable[..., Any]
    parameters: Parameters
    options: dict[str, Any]

    def arguments(self, task: ScorerTask, *, turns: list[str], replies: list[str]) -> dict[str, Any]:
        """Return the arguments of one call. Raises `DataError` naming a parameter for which the row has no column."""
        passed = {**task.prompt.columns, **self.options, "prompt": task.prompt.text, "turns": turns}
        return self.parameters.choose(passed, extra={"replies": replies, "chat": list(task.prompt.chat)}, columns=task.prompt.columns)


def load_environment(component: Component) -> Environment:
    """Import the function. Raises `ConfigError` where it is missing, cannot be imported or has an unknown signature."""
    what, function = f"environment {component.function}", load_plugin(component.function)
    parameters = parameters_of(function, what=what)
    if "turns" not in parameters.accepts or parameters.is_by_position:
        raise ConfigError(f"{what} takes ({parameters.text}), expected {SHAPE}")
    parameters.refuse_unknown(component.options, what=what)
    return Environment(name=component.name, function=function, parameters=parameters, options=component.options)


class EnvironmentRunner:
    """Calls the environment for one episode after the other, in the process that uses it."""

    def __init__(self, environment: Environment, *, decode: Callable[[list[int]], str], encode: Callable[[str], list[int]]) -> None:
        self._environment = environment
        self._decode = decode
        self._encode = encode
        self._runner = asyncio.Runner()
        """It makes its event loop when an asynchronous function is called."""

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The environment's function, and no other."""
        return (self._environment.function,)

    def close(self) -> None:
        """Close the event loop on which an asynchronous function ran."""
        self._runner.close()

    def run(self, call: Call) -> CallResult:
        """Call the function. Never raises."""
        name, started_at, begin = self._environment.name, time.time(), time.perf_counter()
        observation: Observation | None = None
        outcome, error, failure = Outcome.OK, "", None
        try:
            observation = self._observe(call.task)
        except NotAReply as wrong:
            outcome, error = Outcome.INVALID, f"{name} {wrong}"
            failure = FunctionError(cause=str(wrong), where=place_of(self._environment.function))
        except BaseException as raised:  # the boundary to a user's function: whatever it raises, SystemExit too, becomes a counted value
            outcome, error = Outcome.ERROR, f"{name} raised {describe(raised)}"
            failure = error_of(raised, function=self._environment.function)
        duration_s = time.perf_counter() - begin
        return CallResult(
            call_id=call.call_id,
            outcome=outcome,
            error=error[:ERROR_CHARACTERS],
            failed="" if outcome is Outcome.OK else name,
            failure=failure,
            started_at=started_at,
            duration_s=duration_s,
            durations_s={name: duration_s},
            observation=observation,
        )

    def _observe(self, task: ScorerTask) -> Observation | None:
        said = by_turns(task.completions[0], task.turns[0], decode=self._decode)
        returned = self._environment.function(**self._environment.arguments(task, **said))
        if inspect.isawaitable(returned):
            returned = self._runner.run(wait_for_value(returned))
        if returned is None:
            return None
        text, state = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        if not isinstance(text, str) or not isinstance(state, str | None):
            raise NotAReply(f"returned {reprlib.repr(returned)}, expected a text, a text and the name of a state, or None")
        try:
            token_ids = self._encode(text)
        except Exception as error:  # a tokenizer may refuse a character in words of its own
            raise NotAReply(f"said {reprlib.repr(text)}, which cannot be tokenised: {describe(error)}") from error
        if not token_ids:
            raise NotAReply(f"said {reprlib.repr(text)}, which is no token: return None where the episode is over")
        return Observation(
            token_ids=np.array(token_ids, np.int32), state=_digest("said", text) if state is None else _digest("state", state)
        )


def _digest(kind: str, text: str) -> str:
    return f"{kind}:{hashlib.blake2b(text.encode(errors='surrogatepass'), digest_size=16).hexdigest()}"
