"""Loads the parser of tool calls that a run names (`data.tool_call_parser`)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pipelinerl.data.tool_calls import ToolCallParser
from pipelinerl.runtime.imports import of_large_packages


def parser_of(name: str | None, tokenizer: Any, *, ends: Collection[int]) -> ToolCallParser | None:
    """Load vLLM's parser of this name, which imports vLLM: seven seconds of a core, and 450 MB that forks share; None without a name.

    Raises `ConfigError` where there is none of that name, or it does not go with the tokenizer.
    """
    if name is None:
        return None
    with of_large_packages():
        from pipelinerl.engine.vllm.tool_parser import VllmToolCalls
    return VllmToolCalls(name, tokenizer, ends=ends)
