"""An environment with state as its worker calls it: what is asked, what comes of it, and which tokens it is."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelinerl.data.tokenizer import ChatOptions, TextEncoder, codec_of, load_tokenizer
from pipelinerl.data.tool_calls import ToolCallParser
from pipelinerl.errors import ConfigError
from pipelinerl.messages import Finish, Outcome, Prompt, RequestKind, ScorerTask, Turns
from pipelinerl.rewards.calls import Call, CallResult, Component
from pipelinerl.rewards.runner import Runner
from pipelinerl.rewards.stateful import load_stateful, offered_tools
from tests.tokenizers import CHATML

GAMES = Path(__file__).parent / "stateful_games.py"


def component(name: str, **more: Any) -> Component:
    return Component(function=f"{GAMES}:{name}", name=name, options=more.pop("options", {}), is_environment=True, is_stateful=True, **more)


@pytest.fixture(scope="module")
def chat_tokenizer(tokenizer_folder: Path) -> Any:
    """Single characters, with the markers of ChatML and a newline."""
    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(["\n"])
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHATML
    return tokenizer


class Played:
    """An episode as the orchestrator plays it: it keeps the tokens, the worker the object."""

    def __init__(self, tokenizer: Any, loaded: Any, *, chat: bool = False, calls: ToolCallParser | None = None, **columns: Any) -> None:
        self.tokenizer = tokenizer
        options = ChatOptions(chat=chat)
        self.runner = Runner(
            [loaded],
            codec=dataclasses.replace(codec_of(tokenizer, ends={tokenizer.eos_token_id}), calls=calls),
            max_tokens=999,
            entering=lambda _: None,
            chat=dataclasses.asdict(options),
        )
        tools = list(loaded.tools) or None
        encoder = TextEncoder(tokenizer, options=dataclasses.replace(options, tools=tools), opens_turn=False)
        token_ids = np.array(encoder.prompt("what?"), np.int32)
        messages = ({"role": "user", "content": "what?"},) if encoder.is_chat("what?") else ()
        self.prompt = Prompt(prompt_id="0:0", text="what?", token_ids=token_ids, columns=columns, chat=messages)
        self.after: list[int] = []
        self.starts: list[int] = []
        self.ends: list[int] = []

    def ask(self, *, rollout_id: str = "0/1", closes: bool = False) -> CallResult:
        turns = None
        if self.starts:
            columns = [np.array(each, np.int32) for each in (self.starts, self.ends)]
            turns = Turns(starts=columns[0], ends=columns[1], states=("s",) * len(self.starts))
        task = ScorerTask(
            kind=RequestKind.ENVIRONMENT,
            rollout_id=rollout_id,
            attempt=0,
            prompt=self.prompt,
            completions=(np.array(self.after, np.int32),),
            finishes=(Finish.STOP,),
            turns=(turns,),
        )
        return self.runner.run(Call(call_id=1, task=task, closes=closes))

    def begin(self) -> CallResult:
        return self._take(self.ask())

    def say(self, text: str, *, ends: bool = True) -> CallResult:
        sampled = self.tokenizer.encode(text, add_special_tokens=False) + ([self.tokenizer.eos_token_id] if ends else [])
        self.starts.append(len(self.after))
        self.after += sampled
        self.ends.append(len(self.after) - 1)
        return self._take(self.ask())

    @property
    def text(self) -> str:
        return self.tokenizer.decode([*self.prompt.token_ids.tolist(), *self.after], skip_special_tokens=False)

    def _take(self, result: CallResult) -> CallResult:
        if result.observation is not None:
            self.after += result.observation.token_ids.tolist()
        return result


def test_an_object_lives_as_long_as_its_episode_and_rewards_each_turn(tokenizer_folder: Path) -> None:
    game = Played(load_tokenizer(tokenizer_folder), load_stateful(component("Guess", options={"low": 3})), number=7)
    assert game.begin().outcome is Outcome.OK
    first, second, third = game.say("5"), game.say("6"), game.say("7")
    assert [one.outcome for one in (first, second, third)] == [Outcome.OK] * 3
    assert (first.reward, second.reward, third.reward) == (-0.25, -0.25, 1.0)
    assert third.observation is None
    assert game.text == "what?from 3 5<eos>no 1 6<eos>no 2 7<eos>"


def test_a_turn_that_is_asked_for_again_is_answered_as_it_was_and_steps_nothing_twice(tokenizer_folder: Path) -> None:
    game = Played(load_tokenizer(tokenizer_folder), load_stateful(component("Guess")), number=7)
    game.begin()
    first = game.say("5")
    del game.after[-len(first.observation.token_ids) :]  # pyright: ignore[reportOptionalMemberAccess]
    again = game.ask()
    assert again.observation is not None
    assert first.observation is not None
    assert again.observation.token_ids.tolist() == first.observation.token_ids.tolist()
    game.after += again.observation.token_ids.tolist()
    assert game.tokenizer.decode(game.say("6").observation.token_ids.tolist()) == "no 2 "  # pyright: ignore[reportOptionalMemberAccess]


def test_an_episode_that_is_not_here_or_misses_a_turn_is_lost(tokenizer_folder: Path) -> None:
    game = Played(load_tokenizer(tokenizer_folder), load_stateful(component("Guess")), number=7)
    game.begin()
    game.say("5")
    other = game.ask(rollout_id="0/2")
    assert (other.outcome, other.is_lost, other.observation) == (Outcome.ERROR, True, None)
    game.starts.append(len(game.after))
    game.ends.append(len(game.after))
    game.after += [20, 21]
    assert game.say("6").is_lost, "two turns more than it has heard"
    assert game.ask(closes=True).outcome is Outcome.OK
    assert game.ask().is_lost


@pytest.mark.parametrize(
    ("order", "outcome", "error"),
    [
        ("raise", Outcome.ERROR, "Told raised KeyError: 'no such move'"),
        ("nan", Outcome.INVALID, "Told step returned the reward nan, expected a finite number"),
        ("text reward", Outcome.INVALID, "Told step returned the reward '1', expected a finite number"),
        ("great reward", Outcome.INVALID, "Told step returned the reward 10000000000000.0, expected a number up to 1e+12 in size"),
        ("huge", Outcome.INVALID, "Told step returned an observation of 10,000,000 characters, at most 1,048,576 are allowed"),
        ("number", Outcome.INVALID, "Told step returned the observation 7, expected text, or chat messages with role and content"),
        ("two", Outcome.INVALID, "Told step returned ('go on', 0.0), expected (observation, reward, done) or a Step"),
        ("nothing", Outcome.INVALID, "Told step returned None, expected (observation, reward, done) or a Step"),
        ("silent", Outcome.INVALID, "Told step returned no observation and done = False, expected what the model sees next"),
        ("undone", Outcome.INVALID, "Told step returned done = 'no', expected True or False"),
    ],
)
def test_an_environment_that_lies_or_fails_is_an_outcome_with_a_text_and_a_place(
    tokenizer_folder: Path, order: str, outcome: Outcome, error: str
) -> None:
    game = Played(load_tokenizer(tokenizer_folder), load_stateful(component("Told")))
    game.begin()
    said = game.say(order)
    assert (said.outcome, said.error, said.observation, said.reward) == (outcome, error, None, 0.0)
    assert said.failure is not None
    line = next(number for number, text in enumerate(GAMES.read_text().splitlines(), 1) if 'raise KeyError("no such move")' in text)
    assert said.failure.where.endswith(f"stateful_games.py:{line}" if order == "raise" else said.failure.where.rpartition("/")[2])
    assert said.failure.where


def test_a_state_has_the_name_it_was_given_or_that_of_what_was_said(tokenizer_folder: Path) -> None:
    def states(*orders: str) -> list[str]:
        game = Played(load_tokenizer(tokenizer_folder), load_stateful(component("Told")))
        game.begin()
        return [game.say(order).observation.state for order in orders]  # pyright: ignore[reportOptionalMemberAccess]

    assert states("state", "a") == states("state", "a")
    named, other = states("state", "a")
    assert states("b", "state")[1] == named != other


def test_a_chat_is_what_the_template_writes_and_its_turns_are_the_ids_that_were_sampled(chat_tokenizer: Any) -> None:
    game = Played(chat_tokenizer, load_stateful(component("Told")), chat=True)
    game.begin()
    game.say("a")
    said = [
        {"role": role, "content": text} for role, text in (("user", "what?"), ("user", "begin"), ("assistant", "a"), ("user", "heard a"))
    ]
    assert game.text == chat_tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)


def test_a_template_that_cannot_say_what_follows_a_turn_ends_the_episode_as_drift(chat_tokenizer: Any) -> None:
    game = Played(chat_tokenizer, load_stateful(component("Told")), chat=True)
    game.begin()
    chat_tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"  # drops what the model said
    try:
        said = game.say("a")
    finally:
        chat_tokenizer.chat_template = CHATML
    assert (said.outcome, said.has_drifted, said.observation) == (Outcome.OK, True, None)


TOOLS = CHATML.replace("{% for", "{% for t in tools or [] %}{{ t.function.name }}{{ '\\n' }}{% endfor %}{% for", 1)


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ('<tool_call>{"name": "price", "arguments": {"item": "pear"}}</tool_call>', "pear: 3"),
        (
            "<tool_call>price(pear)</tool_call>",
            'error: malformed tool call: expected <tool_call>{"name": ..., "arguments": {...}}</tool_call>',
        ),
        ('<tool_call>{"name": "buy", "arguments": {}}</tool_call>', "error: no tool named buy; there are price"),
    ],
)
def test_a_tool_call_is_parsed_and_a_wrong_one_is_told_to_the_model(chat_tokenizer: Any, said: str, heard: str) -> None:
    chat_tokenizer.chat_template = TOOLS
    try:
        game = Played(chat_tokenizer, load_stateful(component("Shop")), chat=True)
        game.begin()
        assert game.text.startswith("price\n<|im_start|>user\nwhat?")
        answer = game.say(said)
        assert (answer.outcome, answer.reward) == (Outcome.OK, 0.1 if heard == "pear: 3" else 0.0)
        assert game.text.endswith(f"<|im_end|>\n<|im_start|>tool\n{heard}<|im_end|>\n<|im_start|>assistant\n")
        assert game.say("3").reward == 1.0, "an asynchronous environment holds its state"
        game.runner.close()
    finally:
        chat_tokenizer.chat_template = CHATML


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NoStep", "has no step, expected a class with reset"),
        ("WrongStep", "step(self, message: 'str', other: 'str') -> 'None' is not called with one message"),
        ("WrongTools", "tools is ('price',), expected a list of JSON schemas"),
        ("answers", "is a function, expected a class with reset(self, **columns)"),
        ("Nothing", "has no 'Nothing'; it has"),
    ],
)
def test_a_class_that_is_none_is_refused_with_what_was_expected(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_stateful(component(name))
    assert words in str(refused.value)


def test_an_option_that_the_class_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match="has the options high, but its parameters are low"):
        load_stateful(component("Guess", options={"high": 3}))


def test_another_interpreter_plays_the_same_game_and_tells_where_it_failed(tokenizer_folder: Path) -> None:
    played: dict[str, list[Any]] = {}
    for python in ("", sys.executable):
        loaded = load_stateful(component("Guess", python=python, options={"low": 3}))
        game = Played(load_tokenizer(tokenizer_folder), loaded, number=7)
        game.begin()
        answers = [game.say(text) for text in ("5", "x")]
        failure = answers[1].failure
        assert failure is not None
        played[python] = [game.text, answers[0].reward, answers[1].outcome, failure.where.rpartition("/")[2], failure.cause]
        loaded.end()
    assert played[""] == played[sys.executable]
    assert [tool["function"]["name"] for tool in offered_tools(component("Shop", python=sys.executable))] == ["price"]
    with pytest.raises(ConfigError, match="has no step, expected a class with reset and step"):
        load_stateful(component("NoStep", python=sys.executable))


@pytest.mark.parametrize("python", ["", sys.executable])
def test_the_package_of_a_class_is_imported_as_the_class_is_loaded_and_not_within_a_call(python: str) -> None:
    with pytest.raises(ConfigError, match="no_such_game_engine"):
        load_stateful(component("Packaged", python=python))


TEMPLATES = Path(str(importlib.util.find_spec("vllm").submodule_search_locations[0])) / "transformers_utils" / "chat_templates"  # pyright: ignore[reportOptionalMemberAccess, reportOptionalSubscript]


@pytest.mark.parametrize("template", ["template_chatml.jinja", "template_minicpmv45.jinja"])
def test_real_templates_are_continued_to_the_token(chat_tokenizer: Any, template: str) -> None:
    """ChatML as of SmolLM2, and that of Qwen3, which strips the reasoning of earlier turns: what was sampled stays what it was."""
    chat_tokenizer.chat_template = (TEMPLATES / template).read_text()
    try:
        game = Played(chat_tokenizer, load_stateful(component("Told")), chat=True)
        game.begin()
        prompts = [list(game.after)]
        for said in ("<think>b</think>a", "c"):
            game.say(said)
            sampled = [*chat_tokenizer.encode(said), chat_tokenizer.eos_token_id]
            assert game.after[: len(prompts[-1]) + len(sampled)] == [*prompts[-1], *sampled], "the next prompt begins with what was sampled"
            prompts.append(list(game.after))
        said = [
            {"role": role, "content": text}
            for role, text in (("user", "what?"), ("user", "begin"), ("assistant", "a"), ("user", "heard <think>b</think>a"))
        ]
        whole = chat_tokenizer.apply_chat_template(
            [*said, {"role": "assistant", "content": "c"}, {"role": "user", "content": "heard c"}],
            tokenize=False,
            add_generation_prompt=True,
        )
        opened = game.text.replace("<think>\n\n</think>\n\n", "")
        assert opened.replace("assistant\n<think>b</think>a", "assistant\na") == whole.replace("<think>\n\n</think>\n\n", "")
    finally:
        chat_tokenizer.chat_template = CHATML
