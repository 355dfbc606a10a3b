"""Calls the functions of a pool, rewards or an environment, for one task after the other, in the process that uses it.

Whatever a function raises or wrongly returns becomes an outcome with a text, and the place of the error; no failure ever becomes 0.0.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pipelinerl.data.tokenizer import Codec
from pipelinerl.messages import Observation, Outcome, ScorerTask
from pipelinerl.rewards.arguments import WrongReturn
from pipelinerl.rewards.calls import Call, CallResult, Component
from pipelinerl.rewards.environment import Environment, load_environment
from pipelinerl.rewards.reward import Reward, load_rewards, read_values
from pipelinerl.rewards.stateful import Answer, StatefulEnvironment, load_stateful
from pipelinerl.runtime.function_errors import FunctionError, error_of, message_of, place_of

_NO_CHAT: Mapping[str, Any] = MappingProxyType({})
ERROR_CHARACTERS = 2000
"""Maximum length of an error text in a message. A larger one would let one exception with a huge message fill the journal."""


Function = Reward | Environment | StatefulEnvironment


def load_functions(components: Sequence[Component]) -> tuple[Function, ...]:
    """Import the functions of a pool. Raises `ConfigError` where one is missing, cannot be imported or has an unknown signature."""
    if components[0].is_stateful:
        return (load_stateful(components[0]),)
    return (load_environment(components[0]),) if components[0].is_environment else load_rewards(components)


class Runner:
    """Runs the functions of a pool in order."""

    def __init__(
        self,
        functions: Sequence[Function],
        *,
        codec: Codec,
        max_tokens: int,
        entering: Callable[[str], None],
        chat: Mapping[str, Any] = _NO_CHAT,
    ) -> None:
        """Take `entering`, which is called with the name of every function but the first before that function runs, and the settings of
        `chat` (`ChatOptions`), for an environment with state.
        """
        if isinstance(functions[0], StatefulEnvironment):
            functions[0].speak(codec, chat)
        self._functions = functions
        self._codec = codec
        self._max_tokens = max_tokens
        self._entering = entering
        self._loop = asyncio.Runner()
        """It makes its event loop when the first asynchronous function is called."""

    def close(self) -> None:
        """Close the event loop on which asynchronous functions ran."""
        self._loop.close()

    def run_each(self, calls: Sequence[Call]) -> Iterator[CallResult]:
        """Run one call after the other."""
        return map(self.run, calls)

    def run(self, call: Call) -> CallResult:
        """Call the functions; the first one that fails ends the call. Never raises."""
        started_at, begin = time.time(), time.perf_counter()
        durations_s: dict[str, float] = {}
        components: tuple[dict[str, float], ...] = ()
        answer, outcome, error, failed, failure = Answer(), Outcome.OK, "", "", None
        try:
            if isinstance(self._functions[0], StatefulEnvironment):
                answer = self._play(self._functions[0], call, durations_s)
            elif isinstance(self._functions[0], Environment):
                answer = Answer(observation=self._observe(self._functions[0], call.task, durations_s))
            else:
                components = self._score(call.task, durations_s)
        except BaseException as raised:  # the boundary to a user's function: whatever it raises, SystemExit too, becomes a counted value
            name = next(reversed(durations_s), "decoding the tokens")
            function = next((each.function for each in self._functions if each.name == name), None)
            failed, message = name if durations_s else self._functions[0].name, message_of(raised)
            if isinstance(raised, WrongReturn):
                outcome, error, failure = Outcome.INVALID, f"{name} {message}", FunctionError(cause=message, where=place_of(function))
            else:
                error = f"{name} raised {type(raised).__name__}{message and f': {message}'}"
                outcome, failure = Outcome.ERROR, error_of(raised, function=function)
        if answer.is_lost:
            outcome, error = Outcome.ERROR, f"the process that held the environment of {call.task.rollout_id} is gone"
        return CallResult(
            call_id=call.call_id,
            outcome=outcome,
            components=components,
            observation=answer.observation,
            reward=answer.reward,
            is_lost=answer.is_lost,
            has_drifted=answer.has_drifted,
            error=error[:ERROR_CHARACTERS],
            failed=failed,
            failure=failure,
            started_at=started_at,
            duration_s=time.perf_counter() - begin,
            durations_s=durations_s,
        )

    def _play(self, environment: StatefulEnvironment, call: Call, durations_s: dict[str, float]) -> Answer:
        with _timed(environment.name, durations_s):
            if not call.closes:
                return environment.answer(call.task, invoke=self._call)
            environment.close(invoke=self._call)
            return Answer()

    def _observe(self, environment: Environment, task: ScorerTask, durations_s: dict[str, float]) -> Observation | None:
        with _timed(environment.name, durations_s):
            returned = self._call(environment.function, environment.arguments(task, decode=self._codec.decode))
            return environment.read(returned, encode=self._codec.encode)

    def _score(self, task: ScorerTask, durations_s: dict[str, float]) -> tuple[dict[str, float], ...]:
        completions = [self._codec.decode(token_ids.tolist()) for token_ids in task.completions]
        components: tuple[dict[str, float], ...] = tuple({} for _ in completions)
        for reward in self._functions:
            assert isinstance(reward, Reward)
            if durations_s:
                self._entering(reward.name)
            with _timed(reward.name, durations_s):
                arguments = reward.arguments(task, completions=completions, max_tokens=self._max_tokens, decode=self._codec.decode)
                values = read_values(self._call(reward.function, arguments), shape=reward.shape, num_completions=len(completions))
            for found, value in zip(components, values, strict=True):
                if value is not None:
                    found[reward.name] = value
        return components

    def _call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        returned = function(**arguments)
        return self._loop.run(_value_of(returned)) if inspect.isawaitable(returned) else returned


@contextlib.contextmanager
def _timed(name: str, durations_s: dict[str, float]) -> Iterator[None]:
    begin = time.perf_counter()
    durations_s[name] = 0.0
    try:
        yield
    finally:
        durations_s[name] = time.perf_counter() - begin


async def _value_of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
