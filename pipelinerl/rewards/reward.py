"""Finds reward functions, derives from their parameters how they are called, and reads what they return; `runner` calls them.

| shape | marked by | called as | returns |
| --- | --- | --- | --- |
| ours | `completion`, or only `turns` | `reward(prompt=, completion=, **columns)` | a number |
| TRL | `completions`, `completion_ids` | `reward(prompts=[..], completions=[..], **columns)`, lists of one | a list of one number or None |
| verl | `solution_str`, `model_output`, `predict_str` | these and `data_source`, `ground_truth`, `extra_info` | a number or `{score}` |
| verl's batches | `solution_strs` | the same in the plural, lists of one | a list of these |
| reasoning-gym | `answer` with `entry` | `score_answer(answer=, entry=)` | a number |
| verifiers | being a `Rubric` | its functions with `prompt`, `completion`, `answer`, `info`, `state` | numbers, summed by its weights |

A function is passed only the arguments it accepts: the row's columns by name, its `options` from the config, and, where it names them, the
completion's `num_tokens` (those that the model sampled) and `finish`, the run's `max_tokens`, and `chat`, the prompt's messages.
`async def` works in every shape. An exception or a wrong return value becomes an outcome with a text; no failure ever becomes 0.0.

In a run with an environment, a completion is everything after the prompt, including the environment's replies. A function of our shape adds
a `turns` argument to receive only the model's turns, a list of texts, and a `replies` argument to receive the environment's replies to all
turns but the last.

TRL: None says that the function does not apply. As in TRL, prompts and completions are chat messages where the row's prompt is one, and
text where it is text: functions of `trl.rewards` that read a completion expect messages. A function that is configured per group is passed
lists of all siblings; only shapes that take lists can be. verl: a row may hold `ground_truth` or `reward_model = {ground_truth}`; a missing
`extra_info` is an empty dictionary, as in verl. verifiers: see `rubric`. reasoning-gym: `answer` is the text in the last <answer> tag, or
the whole completion; `entry` is the row, with the prompt as `question`.

A function of none of these shapes that can be called with its `options` alone, and then returns one of them, is a factory: it is called
once, when it is loaded. `trl.rewards:get_soft_overlong_punishment` is one.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipelinerl.errors import ConfigError
from pipelinerl.messages import MAX_REWARD, ScorerTask, is_reward
from pipelinerl.rewards.arguments import Parameters, WrongReturn, by_turns, parameters_of
from pipelinerl.rewards.calls import Component
from pipelinerl.rewards.functions.gym_score import answer_in
from pipelinerl.rewards.functions.rubric import adapt_rubric, is_rubric
from pipelinerl.runtime.function_errors import error_of
from pipelinerl.runtime.plugin import load_plugin


class Shape(enum.StrEnum):
    """The way in which a reward function is called."""

    OURS = "reward(prompt, completion, **columns) -> float"
    TRL = "reward(prompts, completions, **columns) -> list[float | None]"
    VERL = "compute_score(data_source, solution_str, ground_truth, extra_info) -> float"
    VERL_BATCH = "compute_score(data_sources, solution_strs, ground_truths, extra_infos) -> list[float]"
    REASONING_GYM = "score_answer(answer, entry) -> float"


_LISTS = (Shape.TRL, Shape.VERL_BATCH)
"""Shapes that are called with lists, and can therefore be called for all siblings at once."""
_MARKS = {
    "completion": Shape.OURS,
    "completions": Shape.TRL,
    "completion_ids": Shape.TRL,
    "solution_str": Shape.VERL,
    "model_output": Shape.VERL,
    "predict_str": Shape.VERL,
    "solution_strs": Shape.VERL_BATCH,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One reward function, ready to be called."""

    name: str
    shape: Shape
    function: Callable[..., Any]
    parameters: Parameters
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options from the config; they take precedence over columns of the same name."""

    def arguments(
        self, task: ScorerTask, *, completions: Sequence[str], max_tokens: int, decode: Callable[[list[int]], str]
    ) -> dict[str, Any]:
        """Return the arguments of one call. Raises `DataError` naming a parameter for which the row has no column."""
        columns = task.prompt.columns
        extra: dict[str, Any] = {}
        if self.shape is Shape.TRL:
            num = len(completions)
            passed = {name: [value] * num for name, value in columns.items()} | self.options
            passed |= {
                "prompts": [list(task.prompt.chat) or task.prompt.text] * num,
                "completions": [_as_chat(text, task) for text in completions],
            }
            extra = {"completion_ids": [token_ids.tolist() for token_ids in task.completions]}
        elif self.shape is Shape.VERL_BATCH:
            one = {"data_source": "", "extra_info": {}, **_verl_truth(columns), **columns, "solution_str": ""}
            passed = {f"{name}s": [value] * len(completions) for name, value in one.items()} | self.options
            passed |= {"solution_strs": list(completions)}
        else:
            (completion,), (token_ids,), (finish,) = completions, task.completions, task.finishes
            if self.shape is Shape.OURS:
                passed = {**columns, **self.options, "prompt": task.prompt.text, "completion": completion}
                (turns,) = task.turns
                num_tokens = len(token_ids) if turns is None else int(turns.mask(len(token_ids)).sum())
                extra = {"num_tokens": num_tokens, "finish": finish.value, "max_tokens": max_tokens, "chat": list(task.prompt.chat)}
                if self.parameters.accepts & {"turns", "replies"}:
                    extra |= by_turns(token_ids, turns, decode=decode)
            elif self.shape is Shape.REASONING_GYM:
                entry = {"question": _question(task), **columns}
                passed = {**self.options, "answer": answer_in(completion), "entry": entry}
            else:
                defaults = {"data_source": "", "extra_info": {}, **_verl_truth(columns)}
                passed = {**defaults, **columns, **self.options, **dict.fromkeys(_VERL_NAMES, completion)}
        return self.parameters.choose(passed, extra=extra, columns=columns)


def load_rewards(components: Sequence[Component]) -> tuple[Reward, ...]:
    """Import every function. Raises `ConfigError` where one is missing, cannot be imported or has an unknown signature."""
    rewards = [inspect_reward(load_plugin(item.function), reference=item.function, options=item.options) for item in components]
    return tuple(dataclasses.replace(reward, name=item.name) for reward, item in zip(rewards, components, strict=True))


def inspect_reward(function: Any, *, reference: str, options: Mapping[str, Any] | None = None) -> Reward:
    """Derive from its parameters how `function` is called. Raises `ConfigError` naming them and the accepted shapes."""
    if is_rubric(function):
        function = adapt_rubric(function, reference=reference)
    parameters = parameters_of(function, what=f"reward {reference}")
    shapes = _shapes_of(parameters)
    if (
        not shapes
        and not parameters.is_by_position
        and (made := _made_by(function, parameters, reference, dict(options or {}))) is not None
    ):
        return inspect_reward(made, reference=reference)
    if len(shapes) != 1 or parameters.is_by_position:
        accepted = "\n".join(f"  {shape.value}" for shape in Shape)
        missing = ", ".join(sorted(parameters.requires - (options or {}).keys()))
        factory = f"\nWhere it makes one of these, name its parameters as options: {missing}" if missing and not shapes else ""
        raise ConfigError(f"reward {reference} takes ({parameters.text}), which is none of the accepted shapes:\n{accepted}{factory}")
    parameters.refuse_unknown(options or {}, what=f"reward {reference}")
    if shapes[0] in (Shape.VERL, Shape.VERL_BATCH):
        parameters = dataclasses.replace(parameters, takes_any=False)  # verl passes what it has, and nothing else
    return Reward(name=reference.rpartition(":")[2], shape=shapes[0], function=function, parameters=parameters, options=dict(options or {}))


def _shapes_of(parameters: Parameters) -> list[Shape]:
    shapes = list({shape for mark, shape in _MARKS.items() if mark in parameters.accepts})
    if not shapes and "turns" in parameters.accepts:
        return [Shape.OURS]
    return [Shape.REASONING_GYM] if not shapes and {"answer", "entry"} <= parameters.accepts else shapes


def _made_by(function: Callable[..., Any], parameters: Parameters, reference: str, options: dict[str, Any]) -> Any:
    """Return the reward function that a factory makes of its options; None where `function` is no factory. Raises `ConfigError` where the
    factory raises.
    """
    if parameters.is_by_position or parameters.requires - options.keys():
        return None
    parameters.refuse_unknown(options, what=f"reward {reference}")
    try:
        made = function(**options)
    except Exception as error:  # a user's function may raise anything; it becomes a named error with its cause
        raise ConfigError(f"reward {reference}, called with its options to make a reward function, raised {error_of(error)}") from error
    return made if callable(made) or is_rubric(made) else None


def read_values(returned: Any, *, shape: Shape, num_completions: int) -> list[float | None]:
    """Return the numbers that a function returned, one for each completion; None where a TRL function says that it does not apply.

    Raises `WrongReturn` where the function returned anything else.
    """
    if shape not in _LISTS:
        return [_number(returned["score"] if _is_verl_dict(returned, shape) else returned, returned=returned)]
    if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__len__"):
        wanted = "one number" if num_completions == 1 else f"{num_completions} numbers"
        raise WrongReturn(f"returned {reprlib.repr(returned)}, expected a list of {wanted}")
    if len(returned) != num_completions:
        plural = "" if num_completions == 1 else "s"
        raise WrongReturn(f"returned {len(returned)} values for {num_completions} completion{plural}: {reprlib.repr(returned)}")
    if shape is Shape.VERL_BATCH:
        return [_number(value["score"] if _is_verl_dict(value, Shape.VERL) else value, returned=returned) for value in returned]
    return [None if value is None else _number(value, returned=returned) for value in returned]


def _is_verl_dict(returned: Any, shape: Shape) -> bool:
    return shape is Shape.VERL and isinstance(returned, Mapping) and "score" in returned


def _number(value: Any, *, returned: Any) -> float:
    if not isinstance(value, numbers.Real) and hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()  # a numpy or torch scalar
    if not isinstance(value, numbers.Real):
        raise WrongReturn(f"returned {reprlib.repr(returned)}, expected a finite number")
    try:
        number = float(value)
    except OverflowError:
        raise WrongReturn(f"returned {reprlib.repr(returned)}, which no float holds") from None
    if not is_reward(number):
        wanted = f"a number up to {MAX_REWARD:g} in size" if math.isfinite(number) else "a finite number"
        raise WrongReturn(f"returned {number}, expected {wanted}")
    return number


def _as_chat(text: str, task: ScorerTask) -> str | list[dict[str, str]]:
    return [{"role": "assistant", "content": text}] if task.prompt.chat else text


_VERL_NAMES = tuple(mark for mark, shape in _MARKS.items() if shape is Shape.VERL)


def _question(task: ScorerTask) -> str:
    """Return the prompt without its chat template, where it has one."""
    contents = [message.get("content") for message in task.prompt.chat if message.get("role") == "user"]
    return contents[-1] if contents and isinstance(contents[-1], str) else task.prompt.text


def _verl_truth(columns: Mapping[str, Any]) -> dict[str, Any]:
    nested = columns.get("reward_model")
    return {"ground_truth": nested["ground_truth"]} if isinstance(nested, Mapping) and "ground_truth" in nested else {}
