"""Tool calls as vLLM's own server reads them: its parser of a name, composed, asked and streamed by the code that its server runs."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.abstract_parser import Parser
from vllm.parser.parser_manager import ParserManager
from vllm.tool_parsers import ToolParserManager

from pipelinerl.data.tool_calls import Said, ToolCall, Tools, until, whole_characters
from pipelinerl.errors import ConfigError, DataError
from pipelinerl.runtime.plugin import nearest

MAX_REQUESTS = 64
"""Lists of tools whose requests are kept. Agents send theirs with every turn; more take memory, fewer validate the same list again."""


class VllmToolCalls:
    """A `ToolCallParser`: one of vLLM's, for one tokenizer."""

    def __init__(self, name: str, tokenizer: Any, *, ends: Collection[int]) -> None:
        """Take a parser's `name` as in `vllm serve --tool-call-parser`, and the tokens that end a turn. Raises `ConfigError`."""
        known = ToolParserManager.list_registered()
        if name not in known:
            raise ConfigError(f"data.tool_call_parser is {name!r}, expected one of {', '.join(known)}{nearest(name, known)}")
        for noisy in ("vllm.tool_parsers", "vllm.parser"):  # they log every call that a model gets wrong, with its stack
            logging.getLogger(noisy).setLevel(logging.CRITICAL)
        try:
            parser = ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True, tokenizer=tokenizer)
        except Exception as error:  # vLLM raises many kinds: a package that is missing, a token that the tokenizer lacks
            raise ConfigError(f"data.tool_call_parser {name!r} cannot be used with this model: {error}") from error
        assert parser is not None, "there is a name"
        self._name = name
        self._parser_class: type[Parser] = parser
        self._tokenizer = tokenizer
        self._ends = frozenset(ends)
        self._request = functools.lru_cache(MAX_REQUESTS)(self._request_of)

    def check(self, tools: Tools) -> None:
        if tools:
            self._request(json.dumps(list(tools)))

    def said(self, token_ids: Sequence[int], *, tools: Tools, stop: Sequence[str] = ()) -> Said:
        request = self._request(json.dumps(list(tools)))
        kept, text = self._decoded(token_ids, request)
        text = until(text, stop)
        try:
            parsed = self._parser(request).parse(text, request, enable_auto_tools=True, model_output_token_ids=kept)
        except Exception as error:  # a parser may raise whatever it likes over what a model wrote
            return Said(text=text, malformed=f"malformed tool call: vLLM's parser {self._name} says {type(error).__name__}")
        reasoning, content, calls = parsed
        found = tuple(ToolCall(name=call.name, arguments=call.arguments) for call in calls or ())
        return Said(text=(reasoning or "") + (content or ""), calls=found) if found else Said(text=text)

    def reader(self, *, tools: Tools) -> Callable[[Sequence[int]], str]:
        request = self._request(json.dumps(list(tools)))
        parser = self._parser(request)
        shown, read_text, num_read, has_failed = "", "", 0, False

        def read(token_ids: Sequence[int]) -> str:
            nonlocal shown, read_text, num_read, has_failed
            kept, text = self._decoded(token_ids, request)
            text = whole_characters(text)
            if has_failed or len(text) <= len(read_text):
                return shown
            try:
                delta = parser.parse_delta(text[len(read_text) :], kept[num_read:], request, prompt_token_ids=[], finished=False)
            except Exception:  # as above; the rest is shown when the turn has ended
                has_failed = True
                return shown
            read_text, num_read = text, len(kept)
            shown += (delta.content or "") if delta is not None else ""
            return shown

        return read

    def _decoded(self, token_ids: Sequence[int], request: ChatCompletionRequest) -> tuple[list[int], str]:
        kept = [one for one in token_ids if one not in self._ends]
        return kept, self._tokenizer.decode(kept, skip_special_tokens=request.skip_special_tokens)

    def _parser(self, request: ChatCompletionRequest) -> Parser:
        """Return a parser for one turn."""
        tools: Any = request.tools
        return self._parser_class(self._tokenizer, tools)

    def _request_of(self, tools: str) -> ChatCompletionRequest:
        """Return a request with these tools, as the parser adjusts it. Raises `DataError`."""
        try:
            request = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": ""}], "tools": json.loads(tools)})
            adjusted = self._parser(request).adjust_request(request)
        except Exception as error:  # pydantic's errors, and what a parser says of a schema
            raise DataError(f"vLLM's parser {self._name} cannot take these tools: {error}") from error
        assert isinstance(adjusted, ChatCompletionRequest)
        return adjusted
