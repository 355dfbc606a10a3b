"""Tool calls in what a model wrote: how parsers are asked, and the one that needs nothing but Python.

`JsonToolCalls` reads the convention of Hermes, Qwen and SmolLM: JSON between `<tool_call>` and `</tool_call>`. What is malformed stays
text: an agent then sees what the model said, and nothing is repaired that the model did not write. Other conventions are read by vLLM's own
parsers (`pipelinerl.engine.vllm.tool_parser`, `data.tool_call_parser`).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

OPENING = "<tool_call>"
MALFORMED = f'malformed tool call: expected {OPENING}{{"name": ..., "arguments": {{...}}}}</tool_call>'
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions, as chat completions name them."""
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool."""

    name: str
    arguments: str
    """JSON, as a rule of an object; what else a model writes there, vLLM's parsers pass on."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a turn says: its text, and the tools that it calls."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    malformed: str = ""
    """Why what looks like a call in the text is none; empty where nothing does, or where the parser cannot tell."""


class ToolCallParser(Protocol):
    """Reads the tool calls of turns."""

    def check(self, tools: Tools) -> None:
        """Raise `DataError` where the tools are none that this parser takes."""

    def said(self, token_ids: Sequence[int], *, tools: Tools, stop: Sequence[str] = ()) -> Said:
        """Split a turn that has ended into text and calls; `stop` are texts that end it before, and are not part of it."""
        ...

    def reader(self, *, tools: Tools) -> Callable[[Sequence[int]], str]:
        """Return a function that is told all tokens of an unfinished turn so far, again and again, and returns its text as far as that is
        known to be no part of a call."""
        ...


class JsonToolCalls:
    """The convention above."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """Take `decode`, which makes text of a turn."""
        self._decode = decode

    def check(self, tools: Tools) -> None:
        """Take whatever a chat template writes."""

    def said(self, token_ids: Sequence[int], *, tools: Tools, stop: Sequence[str] = ()) -> Said:
        return parse(until(self._decode(list(token_ids)), stop))

    def reader(self, *, tools: Tools) -> Callable[[Sequence[int]], str]:
        def read(token_ids: Sequence[int]) -> str:
            text = whole_characters(self._decode(list(token_ids)))
            return text[: num_safe(text)]

        return read


def until(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first of these texts."""
    for one in stop:
        text = text.partition(one)[0]
    return text


def whole_characters(text: str) -> str:
    """Return the text of an unfinished turn without the half of a character at its end."""
    return text.removesuffix("\ufffd")


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
    left = "".join([*rest, text[end:]]).strip() if calls else text
    return Said(text=left, calls=tuple(calls), malformed=MALFORMED if OPENING in left else "")


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
