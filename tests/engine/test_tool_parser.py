"""Tool calls by vLLM's parsers: what ours hands on is what vLLM's own classes say of the same words."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.data.tool_calls import Said
from pipelinerl.engine.options import problems_of_parser
from pipelinerl.engine.tool_parser import parser_of
from pipelinerl.errors import ConfigError, DataError
from tests.gateway.serving import serving
from tests.rewards.test_stateful import TOOLS as PROMPT_WITH_TOOLS
from tests.rewards.test_stateful import Played, component, load_stateful
from tests.tokenizers import make_bytes

needs_vllm = [pytest.mark.vllm, pytest.mark.slow]
PARAMETERS = {"type": "object", "properties": {"item": {"type": "string"}, "num": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "price", "description": "what it costs", "parameters": PARAMETERS}}]
ARGUMENTS = {"item": "pear", "num": 2}
QWEN3_CODER = (
    "<tool_call>\n<function=price>\n<parameter=item>\npear\n</parameter>\n<parameter=num>\n2\n</parameter>\n</function>\n</tool_call>"
)
WORDS = {
    "hermes": f'I ask. <tool_call>{{"name": "price", "arguments": {json.dumps(ARGUMENTS)}}}</tool_call>',
    "qwen3_coder": f"I ask.\n{QWEN3_CODER}",
    "llama3_json": f'{{"name": "price", "parameters": {json.dumps(ARGUMENTS)}}}',
    "pythonic": '[price(item="pear", num=2)]',
    "mistral": f"[TOOL_CALLS]price[ARGS]{json.dumps(ARGUMENTS)}",
    "phi4_mini_json": f'functools[{{"name": "price", "arguments": {json.dumps(ARGUMENTS)}}}]',
    "xlam": f'[{{"name": "price", "arguments": {json.dumps(ARGUMENTS)}}}]',
    "granite": f'<tool_call>[{{"name": "price", "arguments": {json.dumps(ARGUMENTS)}}}]',
    "minimax_m2": '<minimax:tool_call><invoke name="price"><parameter name="item">pear</parameter><parameter name="num">2</parameter>'
    "</invoke></minimax:tool_call>",
}
MARKERS = ["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>", "<minimax:tool_call>", "</minimax:tool_call>"]


def marked(folder: Path) -> Any:
    """A tokenizer of bytes whose special tokens are those that the parsers look for, as in the models that they are for."""
    make_bytes(folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_special_tokens({"eos_token": "<|end|>", "additional_special_tokens": MARKERS})
    return tokenizer


def by_vllm(name: str, tokenizer: Any, words: str) -> Said:
    """What vLLM's class says, asked by nobody but this test."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "?"}], "tools": TOOLS})
    tools: Any = request.tools
    found = ToolParserManager.get_tool_parser(name)(tokenizer, tools).extract_tool_calls(words, request)
    calls = [call.function for call in found.tool_calls]
    return Said(text=found.content or "", calls=tuple((one.name, one.arguments) for one in calls))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_vllm) for name in WORDS])
def test_a_turn_is_split_as_vllms_class_splits_it(tmp_path: Path, name: str) -> None:
    tokenizer = marked(tmp_path)
    parser = parser_of(name, tokenizer, ends={tokenizer.eos_token_id})
    assert parser is not None
    for words in (WORDS[name], "Nothing to ask.", WORDS[name][:-9]):
        said = parser.said([*tokenizer.encode(words, add_special_tokens=False), tokenizer.eos_token_id], tools=TOOLS)
        expected = by_vllm(name, tokenizer, words)
        assert (said.text.strip(), tuple((one.name, one.arguments) for one in said.calls)) == (expected.text.strip(), expected.calls)
        if words == WORDS[name]:
            assert [(one.name, json.loads(one.arguments)) for one in said.calls] == [("price", ARGUMENTS)]
        read, token_ids = parser.reader(tools=TOOLS), tokenizer.encode(words, add_special_tokens=False)
        shown = [read(token_ids[:end]) for end in range(0, len(token_ids) + 8, 8)]
        assert all(after.startswith(before) for before, after in itertools.pairwise(shown))
        assert said.text.startswith(shown[-1].strip()), "what a stream has shown is where the whole begins"


@pytest.mark.vllm
@pytest.mark.slow
def test_a_parser_that_cannot_read_this_model_and_tools_that_are_none_are_refused(tmp_path: Path) -> None:
    make_bytes(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"'llama3_json' cannot be used with this model: .*python_tag"):
        parser_of("llama3_json", tokenizer, ends=())
    with pytest.raises(ConfigError, match=r"data.tool_call_parser is 'hermess', expected one of .*did you mean 'hermes'"):
        parser_of("hermess", tokenizer, ends=())
    parser = parser_of("hermes", tokenizer, ends=())
    assert parser is not None
    with pytest.raises(DataError, match="vLLM's parser hermes cannot take these tools"):
        parser.check([{"type": "function"}])


def test_an_unknown_parser_is_refused_with_the_nearest_before_anything_starts() -> None:
    (problem,) = problems_of_parser("qwen3_code", installed=None)
    assert problem.startswith("data.tool_call_parser is 'qwen3_code', expected a parser of vLLM 0.32.0 (did you mean 'qwen3_coder'?): ")
    assert not list(problems_of_parser("hermes", installed=None))
    assert not list(problems_of_parser(None, installed=None))
    assert not list(problems_of_parser("brand_new", installed="0.99.0")), "another vLLM may have it"
    assert list(problems_of_parser("brand_new", installed="0.32.0+cpu"))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.process
def test_an_agent_gets_its_calls_by_chat_and_by_responses_whole_and_streamed_and_goes_on_from_them(tmp_path: Path) -> None:
    words = WORDS["qwen3_coder"]
    with serving(tmp_path, calls=lambda tokenizer: parser_of("qwen3_coder", tokenizer, ends={tokenizer.eos_token_id})) as desk:
        desk.engine.says = lambda prompt: words
        with desk.client() as client:
            lent = desk.lend(client)
        model = openai.OpenAI(base_url=lent["base_url"], api_key=lent["token"], max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "how much?"}]
        whole = model.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices[0]  # pyright: ignore[reportArgumentType]
        (call,) = whole.message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("price", ARGUMENTS)
        assert (whole.message.content, whole.finish_reason) == ("I ask.", "tool_calls")
        messages += [whole.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        text, calls = "", []
        for chunk in model.chat.completions.create(model="m", messages=messages, tools=TOOLS, stream=True):  # pyright: ignore[reportArgumentType, reportCallIssue]
            delta = chunk.choices[0].delta
            text += delta.content or ""
            calls += delta.tool_calls or []
        assert text.strip() == "I ask."
        assert [(one.function.name, json.loads(one.function.arguments)) for one in calls] == [("price", ARGUMENTS)]
        tool = {"type": "function", **TOOLS[0]["function"]}
        response = model.responses.create(model="m", input="how much?", tools=[tool])  # pyright: ignore[reportArgumentType]
        said = [one for one in response.output if one.type == "function_call"]
        assert [(one.name, json.loads(one.arguments)) for one in said] == [("price", ARGUMENTS)]
        answered = {"type": "function_call_output", "call_id": said[0].call_id, "output": "3"}
        model.responses.create(model="m", input=[answered], tools=[tool], previous_response_id=response.id)  # pyright: ignore[reportArgumentType, reportCallIssue]
        with desk.client() as client:
            turns = client.get(f"/episodes/{lent['episode_id']}", headers={"authorization": f"Bearer {lent['token']}"}).json()["turns"]
        assert [turn["parent"] for turn in turns] == [-1, 1, -1, 4], "each went on from the ids that were sampled"
        assert desk.orchestrator.counts["num_drifted"] == 0
        with pytest.raises(openai.BadRequestError, match="vLLM's parser qwen3_coder cannot take these tools"):
            model.chat.completions.create(model="m", messages=messages, tools=[{"type": "function"}])  # pyright: ignore[reportArgumentType]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (WORDS["qwen3_coder"], "pear: 3"),
        (WORDS["qwen3_coder"].replace("=price", "=buy"), "error: no tool named buy; there are price"),
    ],
)
def test_an_environment_hears_the_calls_that_vllms_parser_reads(tmp_path: Path, said: str, heard: str) -> None:
    tokenizer = marked(tmp_path)
    tokenizer.chat_template = PROMPT_WITH_TOOLS
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKERS, "<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|im_end|>"
    parser = parser_of("qwen3_coder", tokenizer, ends={tokenizer.eos_token_id})
    game = Played(tokenizer, load_stateful(component("Shop")), chat=True, calls=parser)
    game.begin()
    game.say(said)
    assert game.text.endswith(f"<|im_start|>tool\n{heard}<|im_end|>\n<|im_start|>assistant\n")
    game.runner.close()
