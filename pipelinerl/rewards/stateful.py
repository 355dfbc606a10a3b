"""An environment with state: a user's class with `reset` and `step`, whose object lives in a worker for as long as its episode.

The worker holds one episode at a time. The task of a turn carries the whole episode, and the number of turns in it says which step is due:
the step that was taken last is answered again as it was, and whoever asks for any other, or for an episode that is not here, hears that it
is lost. So no object is stepped twice for one turn, and no episode goes on with half of its past.

What the environment says becomes tokens once, here: text as it stands, or, where the prompt is a chat, what the model's chat template
writes between the sampled turn and the next (`pipelinerl.data.chat`). Where the template cannot say, the episode ends with that turn, and
the drift is counted: all that was sampled until then trains, in the context in which it was sampled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import json
import math
import numbers
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pipelinerl.data.chat import ChatTemplate
from pipelinerl.data.tokenizer import ChatOptions, Codec, TextEncoder
from pipelinerl.data.tool_calls import JsonToolCalls, names_of
from pipelinerl.environments import Said, Step, ToolCall, import_package
from pipelinerl.errors import ConfigError
from pipelinerl.messages import MAX_REWARD, Observation, ScorerTask, is_reward
from pipelinerl.rewards.arguments import Parameters, WrongReturn, parameters_of
from pipelinerl.rewards.calls import Component
from pipelinerl.rewards.interpreter import RemoteClass
from pipelinerl.runtime.function_errors import message_of
from pipelinerl.runtime.plugin import load_plugin

SHAPE = "a class with reset(self, **columns) -> observation and step(self, message) -> (observation, reward, done)"
MAX_CHARACTERS = 1 << 20
"""Longest observation. No context holds a longer one, and tokenising it would take the worker's deadline."""
Invoke = Callable[[Callable[..., Any], Mapping[str, Any]], Any]
"""Calls a function with these arguments, and waits for what it returns where it is asynchronous."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an environment answered to one task."""

    observation: Observation | None = None
    """None where the episode is over or lost; and to a reset, where nothing stands before the first turn."""
    reward: float = 0.0
    is_lost: bool = False
    has_drifted: bool = False


@dataclasses.dataclass(slots=True, kw_only=True)
class _Episode:
    """The episode that this worker holds."""

    rollout_id: str
    environment: Any
    num_steps: int = 0
    last: Answer = dataclasses.field(default_factory=Answer)


class StatefulEnvironment:
    """A class of environments, ready to play one episode after the other."""

    def __init__(self, *, name: str, make: Any, options: Mapping[str, Any], reset: Parameters, tools: Sequence[Any]) -> None:
        """Take `make`, the class."""
        self.name = name
        self.function: Any = getattr(make, "step", None) if inspect.isclass(make) else None
        """Its `step`, whose line is told where nobody knows a better one; None of a class under another interpreter."""
        self._make = make
        self._options = options
        self._reset = reset
        self.tools = tuple(tools)
        """JSON schemas of what the model may call."""
        self._episode: _Episode | None = None
        self._texts: _Texts

    def speak(self, codec: Codec, options: Mapping[str, Any]) -> None:
        """Take the tokenizer and the settings of chats (`ChatOptions`), once, before the first answer."""
        chat = ChatOptions(**options)
        self._texts = _Texts(codec, chat if chat.tools is not None or not self.tools else dataclasses.replace(chat, tools=self.tools))

    def answer(self, task: ScorerTask, *, invoke: Invoke) -> Answer:
        """Begin an episode, where the task has no turns yet, or answer its last turn. Raises what the class raises, and `WrongReturn`."""
        turns = task.turns[0]
        if turns is None:
            return self._begin(task, invoke=invoke)
        episode, num_turns = self._episode, len(turns.starts)
        if episode is None or episode.rollout_id != task.rollout_id or num_turns not in (episode.num_steps, episode.num_steps + 1):
            return Answer(is_lost=True)
        if num_turns == episode.num_steps + 1:
            sampled = task.completions[0][int(turns.starts[-1]) : int(turns.ends[-1]) + 1].tolist()
            episode.last = self._step(task, sampled, invoke=invoke)
            episode.num_steps += 1
        return episode.last

    def close(self, *, invoke: Invoke) -> None:
        """Close the environment of the episode that is over. Raises what its `close` raises."""
        episode, self._episode = self._episode, None
        if episode is not None and callable(close := getattr(episode.environment, "close", None)):
            invoke(close, {})

    def arguments(self, task: ScorerTask) -> dict[str, Any]:
        """Return the arguments of `reset`. Raises `DataError` naming a parameter for which the row has no column."""
        columns = task.prompt.columns
        return self._reset.choose(columns, extra={"prompt": task.prompt.text, "chat": list(task.prompt.chat)}, columns=columns)

    def end(self) -> None:
        """End the interpreter of a class that another one runs."""
        if isinstance(self._make, RemoteClass):
            self._make.end()

    def _begin(self, task: ScorerTask, *, invoke: Invoke) -> Answer:
        with contextlib.suppress(Exception):  # an episode that nobody ended; its failure is not this one's
            self.close(invoke=invoke)
        environment = invoke(self._make, dict(self._options))
        self._episode = _Episode(rollout_id=task.rollout_id, environment=environment)
        observation = invoke(environment.reset, self.arguments(task))
        messages = _messages(observation, by="reset")
        token_ids = self._texts.opening(task, messages)
        if not token_ids:
            return Answer()
        return Answer(observation=_observation(token_ids, state=None, messages=messages))

    def _step(self, task: ScorerTask, sampled: list[int], *, invoke: Invoke) -> Answer:
        assert self._episode is not None
        said = self._texts.said(sampled, tools=self._texts.tools(task))
        if isinstance(said, str):
            step = _read(invoke(self._episode.environment.step, {_message_parameter(self._episode.environment): said}))
        else:
            step = Step(observation=said)
        if step.done:
            return Answer(reward=float(step.reward))
        messages = _messages(step.observation, by="step")
        if not any(message["content"] for message in messages):
            raise WrongReturn("step returned no observation and done = False, expected what the model sees next")
        token_ids = self._texts.between(task, sampled, messages)
        if token_ids is None:
            return Answer(reward=float(step.reward), has_drifted=True)
        return Answer(reward=float(step.reward), observation=_observation(token_ids, state=step.state, messages=messages))


def load_stateful(component: Component) -> StatefulEnvironment:
    """Import the class. Raises `ConfigError` where it is missing, cannot be imported, or is no such class."""
    what = f"environment {component.function}"
    if component.python:
        make: Any = RemoteClass(component.function, python=component.python, what=what)
        reset = Parameters(
            accepts=frozenset({"prompt", "chat"}), requires=frozenset(), takes_any=True, is_by_position=False, text="**columns"
        )
        tools: Sequence[Any] = make.tools
    else:
        make = load_plugin(component.function)
        reset, tools = _checked(make, component, what=what)
        try:
            import_package(make)
        except ImportError as error:
            raise ConfigError(
                f"{what} cannot be loaded: {error}; install it, or name an interpreter that has it (environment.python)"
            ) from error
    return StatefulEnvironment(name=component.name, make=make, options=component.options, reset=reset, tools=tools)


def offered_tools(component: Component) -> list[Any]:
    """Return the tools that a class offers its model, as JSON schemas. Raises `ConfigError` as `load_stateful`."""
    loaded = load_stateful(component)
    loaded.end()
    return list(loaded.tools)


def _checked(make: Any, component: Component, *, what: str) -> tuple[Parameters, Sequence[Any]]:
    function: Any = make
    if not inspect.isclass(make):
        raise ConfigError(f"{what} is a {type(make).__name__}, expected {SHAPE}; a function that replies is environment.function")
    missing = [name for name in ("reset", "step") if not callable(getattr(make, name, None))]
    if missing:
        raise ConfigError(f"{what} has no {' and no '.join(missing)}, expected {SHAPE}")
    parameters_of(make, what=what).refuse_unknown(component.options, what=what)
    reset_of, step_of = function.reset, function.step
    step = [one for one in inspect.signature(step_of).parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    if len(step) < 2 or any(one.default is one.empty for one in step[2:]):
        raise ConfigError(f"{what}: step{inspect.signature(step_of)} is not called with one message, expected {SHAPE}")
    reset = parameters_of(reset_of, what=f"{what}: reset")
    own = next(iter(inspect.signature(reset_of).parameters), "self")
    reset = dataclasses.replace(reset, accepts=reset.accepts - {own}, requires=reset.requires - {own})
    return reset, tools_of(make, what=what)


def tools_of(function: Any, *, what: str) -> Sequence[Any]:
    """Return the tools that a class offers: those of its attribute `tools`, as JSON schemas. Raises `ConfigError`."""
    tools = getattr(function, "tools", None) or ()
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools) or len(names_of(tools)) != len(tools):
        raise ConfigError(
            f"{what}: tools is {reprlib.repr(tools)}, expected a list of JSON schemas, each"
            ' {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'
        )
    return tools


class _Texts:
    """The one place where an episode's text becomes tokens, and its tokens text."""

    def __init__(self, codec: Codec, options: ChatOptions) -> None:
        self._codec = codec
        self._encoder = TextEncoder(codec.tokenizer, options=options)
        self._template = ChatTemplate(codec.tokenizer, options=options.chat_template_kwargs, ends=codec.ends)
        self._calls = codec.calls or JsonToolCalls(self._with_markers)

    def tools(self, task: ScorerTask) -> Sequence[Any]:
        """Return the tools of a row."""
        return self._encoder.tools(task.prompt.columns) or ()

    def opening(self, task: ScorerTask, messages: list[dict[str, Any]]) -> list[int]:
        """Return the tokens between the prompt, which opens no turn of the model, and the model's first turn."""
        prompt = task.prompt
        if not prompt.chat:
            return self._plain(messages)
        text = self._encoder.text([*prompt.chat, *messages], prompt.columns)
        token_ids, num_prompt = self._codec.encode(text), len(prompt.token_ids)
        if token_ids[:num_prompt] != prompt.token_ids.tolist():
            raise WrongReturn(
                "reset's messages change how the chat template writes those before them, so the prompt is not their beginning"
            )
        return token_ids[num_prompt:]

    def between(self, task: ScorerTask, sampled: list[int], messages: list[dict[str, Any]]) -> list[int] | None:
        """Return the tokens between a sampled turn and the next; None where the chat template cannot say."""
        if not task.prompt.chat:
            return self._plain(messages)
        return self._template.continuation(messages, sampled=sampled, tools=self.tools(task))

    def said(self, sampled: list[int], *, tools: Sequence[Any]) -> Said | list[dict[str, Any]]:
        """Return what the model said; or the message that tells it why its tool call cannot be made."""
        if not tools:
            return Said.of(self._codec.decode(sampled))
        found = self._calls.said(sampled, tools=tools)
        if found.malformed:
            return _refusal(found.malformed)
        names = names_of(tools)
        if unknown := [call.name for call in found.calls if call.name not in names]:
            return _refusal(f"no tool named {unknown[0][:100]}; there are {', '.join(sorted(names))}")
        calls: list[ToolCall] = []
        for call in found.calls:
            arguments = _object_of(call.arguments)
            if arguments is None:
                return _refusal(f"the arguments of {call.name} are {call.arguments[:100]}, expected a JSON object")
            calls.append(ToolCall(call.name, arguments))
        return Said.of(found.text if calls else self._codec.decode(sampled), tool_calls=tuple(calls))

    def _with_markers(self, sampled: list[int]) -> str:
        """Return the text of a turn with its special tokens, which may be those around a call."""
        return self._codec.tokenizer.decode([one for one in sampled if one not in self._codec.ends], skip_special_tokens=False)

    def _plain(self, messages: list[dict[str, Any]]) -> list[int]:
        text = "".join(message["content"] for message in messages)
        try:
            return self._codec.encode(text)
        except Exception as error:  # a tokenizer may refuse a character in words of its own
            why = f"{type(error).__name__}: {message_of(error)}"
            raise WrongReturn(f"said {reprlib.repr(text)}, which cannot be tokenised: {why}") from error


def _object_of(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _refusal(text: str) -> list[dict[str, Any]]:
    return [{"role": "tool", "content": f"error: {text}"}]


def _message_parameter(environment: Any) -> str:
    """Return the name under which `step` takes its message."""
    return next(iter(inspect.signature(environment.step).parameters))


def _read(returned: Any) -> Step:
    """Return a step. Raises `WrongReturn` where that is none."""
    if isinstance(returned, tuple) and len(returned) == 3:
        returned = Step(*returned)
    if not isinstance(returned, Step):
        raise WrongReturn(f"step returned {reprlib.repr(returned)}, expected (observation, reward, done) or a Step")
    reward = returned.reward
    if not isinstance(reward, numbers.Real) or not is_reward(reward):
        is_finite = isinstance(reward, int | float) and math.isfinite(reward)
        wanted = f"a number up to {MAX_REWARD:g} in size" if is_finite else "a finite number"
        raise WrongReturn(f"step returned the reward {reprlib.repr(reward)}, expected {wanted}")
    if not isinstance(returned.done, bool | np.bool_):
        raise WrongReturn(f"step returned done = {reprlib.repr(returned.done)}, expected True or False")
    if not isinstance(returned.state, str | None):
        raise WrongReturn(f"step returned the state {reprlib.repr(returned.state)}, expected its name")
    return returned


def _messages(observation: Any, *, by: str) -> list[dict[str, Any]]:
    """Return an observation as chat messages. Raises `WrongReturn` where it is none, or too long."""
    if observation is None or observation == "":
        return []
    found = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    is_chat = isinstance(found, list | tuple) and all(
        isinstance(one, Mapping) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str) for one in found
    )
    if not is_chat:
        raise WrongReturn(
            f"{by} returned the observation {reprlib.repr(observation)}, expected text, or chat messages with role and content"
        )
    messages = [dict(one) for one in found]
    if (num := sum(len(message["content"]) for message in messages)) > MAX_CHARACTERS:
        raise WrongReturn(f"{by} returned an observation of {num:,} characters, at most {MAX_CHARACTERS:,} are allowed")
    return messages


def _observation(token_ids: list[int], *, state: str | None, messages: list[dict[str, Any]]) -> Observation:
    if not token_ids:
        raise WrongReturn(f"said {reprlib.repr(messages)}, which is no token")
    kind, text = ("said", json.dumps(messages, sort_keys=True, default=str)) if state is None else ("state", state)
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return Observation(token_ids=np.array(token_ids, np.int32), state=f"{kind}:{digest}")
