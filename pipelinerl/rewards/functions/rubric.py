"""A `verifiers` rubric as a reward function: the rubric's functions, called with the arguments it would pass, summed with its weights.

The rubric's functions are called here and not through `score_rollout`, which turns an exception into 0.0: a verifier that fails is an
outcome, never a reward. They may name the arguments that a rubric of verifiers 0.1 offers: `prompt` and `completion` as chat messages,
`answer`, `info`, `task`, `state`, the row's other columns and the rubric's own objects (`parser`). verifiers 0.4 has no rubrics: its
rewards are methods of a `Task` and read a graph of turns, which is not offered here.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from pipelinerl.errors import ConfigError

_FUNCTIONS = ("_get_reward_funcs", "get_reward_funcs")
_WEIGHTS = ("_get_reward_weights", "get_reward_weights")
_PLURALS = {"prompts", "completions", "answers", "states", "tasks", "infos"}


def is_rubric(candidate: Any) -> bool:
    """Return true where the candidate has the methods of a `verifiers` rubric; nothing is imported for this."""
    return _method(candidate, _FUNCTIONS) is not None and _method(candidate, _WEIGHTS) is not None


def adapt_rubric(rubric: Any, *, reference: str) -> Callable[..., Awaitable[float]]:
    """Return the rubric as an asynchronous function of our shape. Raises `ConfigError` on a function that compares siblings."""
    functions, weights = _method(rubric, _FUNCTIONS), _method(rubric, _WEIGHTS)
    assert functions is not None
    assert weights is not None
    pairs = list(zip(functions(), weights(), strict=True))
    for function, _ in pairs:
        if _PLURALS & inspect.signature(function).parameters.keys():
            raise ConfigError(f"rubric {reference}: {function.__name__} compares siblings; name it as a reward of its own, per group")

    async def reward(prompt: str, completion: str, chat: list[dict[str, Any]], **columns: Any) -> float:
        offered = _objects(rubric, chat or [{"role": "user", "content": prompt}], completion, columns)
        values = [await _call(function, offered) for function, _ in pairs]
        return sum(weight * value for (_, weight), value in zip(pairs, values, strict=True))

    return reward


def _objects(rubric: Any, prompt: list[dict[str, Any]], completion: str, columns: dict[str, Any]) -> dict[str, Any]:
    rollout = {
        "prompt": prompt,
        "completion": [{"role": "assistant", "content": completion}],
        "answer": columns.get("answer", ""),
        "info": columns.get("info", {}),
        "task": columns.get("task", "default"),
    }
    return {**columns, **getattr(rubric, "class_objects", {}), **rollout, "state": {**columns, **rollout}}


async def _call(function: Callable[..., Any], offered: dict[str, Any]) -> float:
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    returned = function(**(offered if takes_any else {name: value for name, value in offered.items() if name in parameters}))
    return await returned if inspect.isawaitable(returned) else returned


def _method(candidate: Any, names: tuple[str, ...]) -> Callable[[], Any] | None:
    return next((getattr(candidate, name) for name in names if callable(getattr(candidate, name, None))), None)
