"""Tool calls in what a model wrote, by the convention of Hermes, Qwen and SmolLM: JSON between `<tool_call>` and `</tool_call>`.

What is malformed stays text: an agent then sees what the model said, and nothing is repaired that the model did not write.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

OPENING = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool."""

    name: str
    arguments: str
    """JSON of an object."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a turn says: its text, and the tools that it calls."""

    text: str
    calls: tuple[ToolCall, ...] = ()


def parse(text: str) -> Said:
    """Split a turn into text and tool calls. A call that is no JSON object with a name and arguments stays in the text."""
    calls: list[ToolCall] = []
    rest, end = [], 0
    for found in _CALL.finditer(text):
        call = _call_of(found[1])
        if call is None:
            continue
        calls.append(call)
        rest.append(text[end : found.start()])
        end = found.end()
    return Said(text="".join([*rest, text[end:]]).strip(), calls=tuple(calls)) if calls else Said(text=text)


def num_safe(text: str) -> int:
    """Return how many characters of an unfinished turn can be no part of a tool call: those that may be shown already."""
    if (start := text.find(OPENING)) >= 0:
        return start
    for length in range(min(len(OPENING) - 1, len(text)), 0, -1):
        if OPENING.startswith(text[-length:]):
            return len(text) - length
    return len(text)


def names_of(tools: Sequence[Any]) -> frozenset[str]:
    """Return the names of the functions among the tools of a chat request."""
    functions = [tool.get("function", {}) for tool in tools if isinstance(tool, dict)]
    return frozenset(str(function["name"]) for function in functions if isinstance(function, dict) and "name" in function)


def _call_of(text: str) -> ToolCall | None:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return None
    arguments = said.get("arguments", said.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments' JSON as a string
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return ToolCall(name=said["name"], arguments=json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
