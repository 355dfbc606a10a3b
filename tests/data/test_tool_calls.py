"""Tool calls: what is well formed is a call, and whatever is not stays what the model said."""

from __future__ import annotations

import pytest

from pipelinerl.data.tool_calls import MALFORMED, Said, ToolCall, num_safe, parse

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_calls_are_taken_out_of_the_text() -> None:
    said = parse(f"I add. {CALL}\n{CALL.replace('add', 'sub')}")
    assert said == Said(text="I add.", calls=(ToolCall(name="add", arguments='{"a": 1}'), ToolCall(name="sub", arguments='{"a": 1}')))


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        "<tool_call>{broken</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": 3}</tool_call>',
        '<tool_call>["add"]</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_what_is_malformed_stays_text(text: str) -> None:
    assert parse(text) == Said(text=text, malformed=MALFORMED if "<tool_call>" in text else "")


def test_arguments_written_as_a_text_are_read() -> None:
    assert parse('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>').calls == (ToolCall(name="f", arguments='{"a": 1}'),)


@pytest.mark.parametrize(("text", "shown"), [("abc", 3), ("abc<", 3), ("abc<tool", 3), ("abc<tool_call>{", 3), ("a<b", 3), ("", 0)])
def test_what_may_be_the_beginning_of_a_call_is_held_back(text: str, shown: int) -> None:
    assert num_safe(text) == shown
