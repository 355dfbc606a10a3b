"""How reward functions are recognised, called and judged, in the process of the test."""

from __future__ import annotations

import asyncio
import contextlib
import fractions
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pipelinerl.data.tokenizer import Codec
from pipelinerl.errors import ConfigError
from pipelinerl.messages import Finish, Outcome, Prompt, RequestKind, ScorerTask
from pipelinerl.rewards.calls import Call, CallResult
from pipelinerl.rewards.reward import Reward, Shape, inspect_reward, read_values
from pipelinerl.rewards.runner import ERROR_CHARACTERS, Runner
from pipelinerl.runtime.function_errors import place_of

COLUMNS: dict[str, Any] = {"answer": "42", "level": 3}


def run(*functions: Any, columns: dict[str, Any] = COLUMNS, chat: tuple[dict[str, Any], ...] = ()) -> CallResult:
    """Score the completion "abc" of the prompt "what?" with these functions."""
    rewards = [inspect_reward(function, reference=f"file.py:f{index}") for index, function in enumerate(functions)]
    with contextlib.closing(scoring(*rewards)) as runner:
        return runner.run(make_call(columns, chat=chat))


def values(result: CallResult) -> dict[str, float]:
    (components,) = result.components
    return components


def scoring(*rewards: Reward, entered: list[str] | None = None) -> Runner:
    entering = entered.append if entered is not None else lambda name: None
    codec = Codec(decode=lambda token_ids: "".join(map(chr, token_ids)), encode=lambda text: list(map(ord, text)))
    return Runner(rewards, codec=codec, max_tokens=100, entering=entering)


def make_call(columns: dict[str, Any] = COLUMNS, *, chat: tuple[dict[str, Any], ...] = (), completions: tuple[str, ...] = ("abc",)) -> Call:
    ids = tuple(np.array([ord(character) for character in text], np.int32) for text in completions)
    task = ScorerTask(
        kind=RequestKind.REWARD if len(ids) == 1 else RequestKind.GROUP_REWARD,
        rollout_id="r",
        attempt=0,
        prompt=Prompt(prompt_id="0:0", text="what?", token_ids=np.zeros(1, np.int32), columns=columns, chat=chat),
        completions=ids,
        finishes=(Finish.LENGTH,) * len(ids),
        turns=(None,) * len(ids),
    )
    return Call(call_id=7, task=task)


def test_our_shape_gets_texts_and_the_columns_it_names() -> None:
    seen = {}

    def reward(prompt: str, completion: str, answer: str) -> float:
        seen.update(prompt=prompt, completion=completion, answer=answer)
        return 0.25

    result = run(reward)
    assert (result.call_id, result.outcome, result.components) == (7, Outcome.OK, ({"f0": 0.25},))
    assert seen == {"prompt": "what?", "completion": "abc", "answer": "42"}


def test_our_shape_with_star_columns_gets_every_column_and_nothing_else() -> None:
    seen = {}

    def reward(completion: str, **columns: Any) -> float:
        seen.update(columns)
        return 0.0

    run(reward)
    assert seen == {"prompt": "what?", **COLUMNS}


def test_our_shape_gets_facts_of_the_completion_where_it_names_them() -> None:
    seen = {}

    def reward(completion: str, *, num_tokens: int, finish: str, max_tokens: int) -> float:
        seen.update(num_tokens=num_tokens, finish=finish, max_tokens=max_tokens)
        return 0.0

    run(reward)
    assert seen == {"num_tokens": 3, "finish": "length", "max_tokens": 100}


def test_column_does_not_replace_the_completion_but_does_replace_a_fact() -> None:
    seen = {}

    def reward(completion: str, finish: str) -> float:
        seen.update(completion=completion, finish=finish)
        return 0.0

    run(reward, columns={"completion": "from the row", "finish": "from the row"})
    assert seen == {"completion": "abc", "finish": "from the row"}


def test_trl_shape_gets_lists_of_one() -> None:
    seen = {}

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: list[Any]) -> list[float]:
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        return [2.0]

    assert values(run(reward)) == {"f0": 2.0}
    assert seen == {"prompts": ["what?"], "completions": ["abc"], "completion_ids": [[97, 98, 99]], "answer": ["42"], "level": [3]}


CHAT = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "what?"})


def test_trl_shape_gets_chat_messages_where_the_row_s_prompt_is_a_chat() -> None:
    seen = {}

    def reward(prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float]:
        seen.update(prompts=prompts, completions=completions)
        return [float(len(completions[0][0]["content"]))]

    assert values(run(reward, chat=CHAT)) == {"f0": 3.0}
    assert seen == {"prompts": [list(CHAT)], "completions": [[{"role": "assistant", "content": "abc"}]]}
    assert values(run(lambda completion, prompt: float((prompt, completion) == ("what?", "abc")), chat=CHAT)) == {"f0": 1.0}


def test_trl_shape_is_known_by_token_ids_alone() -> None:
    def lengths(completion_ids: list[list[int]]) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    assert values(run(lengths)) == {"f0": 3.0}
    assert scoring(inspect_reward(lengths, reference="file.py:f")).run(make_group("a", "bb")).components == ({"f": 1.0}, {"f": 2.0})


def test_trl_shape_gets_only_what_it_names() -> None:
    def reward(completions: list[str], answer: list[str]) -> list[float]:
        return [float(completions == ["abc"] and answer == ["42"])]

    assert values(run(reward)) == {"f0": 1.0}


def test_verl_shape_gets_its_four_arguments_from_the_columns() -> None:
    seen = {}

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        seen.update(data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info)
        return 1.0

    run(
        compute_score, columns={"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "42"}, "extra_info": {"index": 5}}
    )
    assert seen == {"data_source": "gsm8k", "solution_str": "abc", "ground_truth": "42", "extra_info": {"index": 5}}
    run(compute_score, columns={"ground_truth": "43"})
    assert seen == {"data_source": "", "solution_str": "abc", "ground_truth": "43", "extra_info": {}}


def test_verl_dict_counts_by_its_score() -> None:
    def compute_score(solution_str: str, ground_truth: str) -> dict[str, Any]:
        return {"score": 0.5, "acc": True}

    assert values(run(compute_score, columns={"ground_truth": "42"})) == {"f0": 0.5}


@pytest.mark.parametrize("name", ["solution_str", "model_output", "predict_str"])
def test_verl_modules_name_the_completion_differently(name: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def compute_score({name}, ground_truth, use_boxed=True): return float(({name}, ground_truth) == ('abc', '42'))", namespace)
    assert values(run(namespace["compute_score"], columns={"reward_model": {"ground_truth": "42"}})) == {"f0": 1.0}


def test_verl_function_over_batches_gets_lists_of_one_or_of_all_siblings() -> None:
    seen = {}

    def compute_score_batched(
        data_sources: list[str], solution_strs: list[str], ground_truths: list[str], extra_infos: list[Any]
    ) -> list[Any]:
        seen.update(data_sources=data_sources, solution_strs=solution_strs, ground_truths=ground_truths, extra_infos=extra_infos)
        return [{"score": float(len(text))} for text in solution_strs]

    assert values(run(compute_score_batched, columns={"ground_truth": "42"})) == {"f0": 3.0}
    assert seen == {"data_sources": [""], "solution_strs": ["abc"], "ground_truths": ["42"], "extra_infos": [{}]}
    reward = inspect_reward(compute_score_batched, reference="file.py:f")
    call = make_call({"ground_truth": "42"}, completions=("a", "bb"))
    assert scoring(reward).run(call).components == ({"f": 1.0}, {"f": 2.0})


def test_reasoning_gym_shape_gets_the_answer_and_the_row_as_its_entry() -> None:
    seen = []

    def score_answer(answer: str | None, entry: dict[str, Any]) -> float:
        seen.append((answer, entry))
        return 1.0

    assert values(run(score_answer, chat=CHAT)) == {"f0": 1.0}
    assert seen == [("abc", {"question": "what?", **COLUMNS})]
    reward = inspect_reward(score_answer, reference="file.py:f")
    text = "<think>no</think><answer> 7 </answer>"
    scoring(reward).run(make_call(completions=(text,)))
    assert seen[-1][0] == "7"


def test_factory_is_called_once_with_its_options() -> None:
    made = []

    def get_penalty(longest: int, factor: float = 2.0) -> Callable[..., list[float]]:
        made.append(longest)
        return lambda completion_ids, **columns: [-factor * max(0, len(ids) - longest) for ids in completion_ids]

    reward = inspect_reward(get_penalty, reference="file.py:get_penalty", options={"longest": 1})
    assert scoring(reward).run(make_call()).components == ({"get_penalty": -4.0},)
    assert made == [1]
    with pytest.raises(ConfigError, match=r"takes \(longest.*\), which is none(?s:.*)name its parameters as options: longest"):
        inspect_reward(get_penalty, reference="file.py:get_penalty")
    with pytest.raises(ConfigError, match="has the options facto, but its parameters are factor, longest"):
        inspect_reward(get_penalty, reference="file.py:get_penalty", options={"longest": 1, "facto": 1})


def test_factory_that_raises_says_what_and_where() -> None:
    def broken(longest: int) -> None:
        raise ValueError("longest must be even")

    with pytest.raises(ConfigError, match=r'make a reward function, raised ValueError\("longest must be even"\) at .*test_rewards.py:\d+'):
        inspect_reward(broken, reference="file.py:broken", options={"longest": 1})


def test_missing_column_is_an_error_that_names_it_and_those_there_are() -> None:
    def reward(completion: str, solution: str) -> float:
        return 1.0

    result = run(reward)
    assert (result.outcome, result.components, result.failed) == (Outcome.ERROR, (), "f0")
    assert result.error == "f0 raised DataError: needs solution, but the row has only the columns answer, level"
    assert result.failure is not None
    assert (result.failed, result.failure.where) == ("f0", place_of(reward)), "nothing of the function ran"


def test_async_function_runs_on_one_event_loop_for_all_calls() -> None:
    loops = []

    async def reward(completion: str) -> float:
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return float(len(completion))

    with contextlib.closing(scoring(inspect_reward(reward, reference="file.py:reward"))) as score:
        assert [score.run(make_call()).components for _ in range(2)] == [({"reward": 3.0},)] * 2
    assert loops[0] is loops[1]
    assert loops[0].is_closed()


def test_trl_none_leaves_the_component_out() -> None:
    result = run(lambda completion: 2.0, lambda completions: [None])
    assert (result.outcome, result.components) == (Outcome.OK, ({"f0": 2.0},))


@pytest.mark.parametrize(
    ("returned", "shape", "said"),
    [
        (None, Shape.OURS, "returned None, expected a finite number"),
        (math.nan, Shape.OURS, "returned nan, expected a finite number"),
        (-math.inf, Shape.OURS, "returned -inf, expected a finite number"),
        ("1.0", Shape.OURS, "returned '1.0', expected a finite number"),
        (-1e13, Shape.OURS, "returned -10000000000000.0, expected a number up to 1e+12 in size"),
        ([1.0], Shape.OURS, "returned [1.0], expected a finite number"),
        (np.array([1.0, 2.0]), Shape.OURS, "returned array([1., 2.]), expected a finite number"),
        (1j, Shape.OURS, "returned 1j, expected a finite number"),
        ({"score": 1.0}, Shape.OURS, "returned {'score': 1.0}, expected a finite number"),
        (10**400, Shape.OURS, "which no float holds"),
        (1.0, Shape.TRL, "returned 1.0, expected a list of one number"),
        (None, Shape.TRL, "returned None, expected a list of one number"),
        ("1", Shape.TRL, "returned '1', expected a list of one number"),
        ([], Shape.TRL, "returned 0 values for 1 completion: []"),
        ([1.0, 2.0], Shape.TRL, "returned 2 values for 1 completion: [1.0, 2.0]"),
        ([math.nan], Shape.TRL, "returned nan, expected a finite number"),
        (["1"], Shape.TRL, "returned ['1'], expected a finite number"),
        ({"acc": 1.0}, Shape.VERL, "returned {'acc': 1.0}, expected a finite number"),
        ({"score": None}, Shape.VERL, "returned {'score': None}, expected a finite number"),
    ],
)
def test_what_is_no_finite_number_is_invalid_and_says_what_came(returned: Any, shape: Shape, said: str) -> None:
    functions: dict[Shape, Callable[..., Any]] = {
        Shape.OURS: lambda completion: returned,
        Shape.TRL: lambda completions: returned,
        Shape.VERL: lambda solution_str: returned,
    }
    result = run(functions[shape])
    assert (result.outcome, result.components) == (Outcome.INVALID, ())
    assert result.error.startswith("f0 returned ")
    assert result.error.endswith(said)


@pytest.mark.parametrize(
    ("returned", "value"),
    [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (np.int64(2), 2.0), (np.bool_(True), 1.0), (np.array(3.0), 3.0)],
)
def test_numbers_of_every_kind_count(returned: Any, value: float) -> None:
    assert read_values(returned, shape=Shape.OURS, num_completions=1) == [value]
    assert read_values([returned], shape=Shape.TRL, num_completions=1) == [value]
    assert read_values(np.array([value]), shape=Shape.TRL, num_completions=1) == [value]
    assert read_values(fractions.Fraction(1, 2), shape=Shape.OURS, num_completions=1) == [0.5]


@pytest.mark.parametrize("raised", [ValueError("bad \\frac"), SystemExit(2), KeyboardInterrupt(), MemoryError()])
def test_whatever_a_function_raises_is_an_error_with_its_name_and_ends_the_call(raised: BaseException) -> None:
    later = []

    def reward(completion: str) -> float:
        raise raised

    result = run(lambda completion: 1.0, reward, lambda completion: later.append(1) or 1.0)
    assert (result.outcome, result.components) == (Outcome.ERROR, ())
    expected = f"{type(raised).__name__}: {raised}" if str(raised) else type(raised).__name__
    assert result.error == f"f1 raised {expected}"
    assert not later


def test_exception_that_cannot_be_printed_and_one_without_end_are_survived() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def unprintable(completion: str) -> float:
        raise Unprintable

    def endless(completion: str) -> float:
        raise ValueError("x" * 10_000_000)

    assert run(unprintable).error == "f0 raised Unprintable: (message unavailable: its __str__ raised RuntimeError)"
    assert len(run(endless).error) == ERROR_CHARACTERS


def test_every_function_but_the_first_is_announced() -> None:
    entered: list[str] = []
    rewards = [inspect_reward(lambda completion: 1.0, reference=f"file.py:f{index}") for index in range(3)]
    scoring(*rewards, entered=entered).run(make_call())
    assert entered == ["f1", "f2"]


def _ambiguous(completion: str, completions: list[str]) -> float: ...  # pyright: ignore[reportReturnType]
def _unknown(text: str, label: int = 3) -> float: ...  # pyright: ignore[reportReturnType]
def _positional(prompt: str, completion: str, /) -> float: ...  # pyright: ignore[reportReturnType]
def _half_positional(text: str, /, completion: str) -> float: ...  # pyright: ignore[reportReturnType]
def _empty() -> float: ...  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (_unknown, "(text: str, label: int = 3)"),
        (_ambiguous, "(completion: str, completions: list[str])"),
        (_positional, "(prompt: str, completion: str)"),
        (_half_positional, "(text: str, completion: str)"),
        (_empty, "(no parameters)"),
    ],
)
def test_unknown_signature_is_refused_with_the_three_that_are_known(function: Any, found: str) -> None:
    with pytest.raises(ConfigError) as raised:
        inspect_reward(function, reference="file.py:reward")
    text = str(raised.value).replace("'", "")
    assert text.startswith(f"reward file.py:reward takes {found}, which is none of the accepted shapes")
    assert all(shape.value in text for shape in Shape)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward file.py:reward is a float, expected a function"):
        inspect_reward(0.5, reference="file.py:reward")


def test_callable_object_and_partial_are_functions() -> None:
    class Judge:
        def __call__(self, completion: str) -> float:
            return 4.0

    def scaled(completion: str, factor: float) -> float:
        return factor

    assert values(run(Judge())) == {"f0": 4.0}
    assert values(run(functools.partial(scaled, factor=5.0))) == {"f0": 5.0}


def test_options_of_the_config_go_before_columns_of_the_row() -> None:
    def reward(completion: str, factor: float, answer: str) -> float:
        return factor * len(answer)

    (loaded,) = [inspect_reward(reward, reference="file.py:reward", options={"factor": 2.0, "answer": "four"})]
    assert values(scoring(loaded).run(make_call({"answer": "42", "factor": 100.0}))) == {"reward": 8.0}


def test_option_that_no_parameter_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward file.py:reward has the options factr, but its parameters are completion, factor"):
        inspect_reward(lambda completion, factor: 1.0, reference="file.py:reward", options={"factr": 2.0})


def test_function_per_group_gets_all_siblings_and_answers_for_each() -> None:
    seen = {}

    def rank(prompts: list[str], completions: list[str], answer: list[str]) -> list[float | None]:
        seen.update(prompts=prompts, completions=completions, answer=answer)
        return [1.0, None, 3.0]

    result = scoring(inspect_reward(rank, reference="file.py:rank")).run(make_group("a", "bb", "ccc"))
    assert result.components == ({"rank": 1.0}, {}, {"rank": 3.0})
    assert seen == {"prompts": ["what?"] * 3, "completions": ["a", "bb", "ccc"], "answer": ["42"] * 3}


@pytest.mark.parametrize("returned", [[1.0, 2.0], [1.0, 2.0, 3.0, 4.0], [1.0, math.nan, 3.0]])
def test_group_function_that_answers_for_others_or_with_nan_fails_as_a_whole(returned: list[float]) -> None:
    result = scoring(inspect_reward(lambda completions: returned, reference="file.py:f")).run(make_group("a", "b", "c"))
    assert (result.outcome, result.components, result.failed) == (Outcome.INVALID, (), "f")


def make_group(*completions: str) -> Call:
    return make_call(completions=completions)


class Rubric:
    """The part of a verifiers 0.1 rubric that is used here, with functions of the kinds it allows."""

    def __init__(self) -> None:
        self.class_objects = {"parser": str.upper}

    def _get_reward_funcs(self) -> list[Callable[..., Any]]:
        def right(completion: list[dict[str, str]], answer: str, parser: Callable[[str], str]) -> float:
            return float(parser(completion[-1]["content"]) == "ABC" and answer == "42")

        async def level(state: dict[str, Any], **kwargs: Any) -> float:
            return float(state["level"] + kwargs["level"])

        return [right, level]

    def _get_reward_weights(self) -> list[float]:
        return [10.0, 0.5]


def test_rubric_s_functions_are_called_its_way_and_summed_with_its_weights() -> None:
    assert values(run(Rubric())) == {"f0": 10.0 * 1.0 + 0.5 * (3 + 3)}


def test_rubric_gets_the_chat_of_the_row_or_makes_one_of_its_text() -> None:
    seen = []

    class Told(Rubric):
        def _get_reward_funcs(self) -> list[Callable[..., Any]]:
            return [lambda prompt: float(bool(seen.append(prompt)))]

        def _get_reward_weights(self) -> list[float]:
            return [1.0]

    assert values(run(Told(), chat=CHAT)) == {"f0": 0.0}
    run(Told())
    assert seen == [list(CHAT), [{"role": "user", "content": "what?"}]]


def test_rubric_whose_function_fails_is_an_error_and_not_its_zero() -> None:
    result = run(Rubric(), columns={"answer": "42"})
    assert (result.outcome, result.error) == (Outcome.ERROR, "f0 raised KeyError: 'level'")
