"""The check of `engine.options` and `data.tool_call_parser` against a table of the pinned vLLM: names, kinds and values.

vLLM says so itself, once it has been imported: half a minute into the run, on another machine. The table is made by
`python -m scripts.vllm_options`, and a test holds it against the vLLM that is installed there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from pipelinerl.runtime.plugin import nearest

OWN_KEYS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "max_model_len": "model.max_tokens",
    "max_num_seqs": "engine.max_running",
    "kv_cache_memory_bytes": "engine.kv_cache_bytes",
    "seed": "run.seed",
    "async_scheduling": "engine.async_scheduling",
    "speculative_config": "engine.speculation",
}
"""Arguments that a run sets from a key of its own, which other processes read, too."""
FIXED = {
    "async_scheduling": (False, "vLLM has found that it slows models down which score"),
    "skip_tokenizer_init": (True, "engines are sent tokens and answer tokens"),
}
"""Arguments with one value that the rest of the run stands on."""
_KINDS = {"bool": bool, "int": int, "float": (int, float), "str": str, "table": dict, "list": list}


@cache
def pinned(part: str) -> tuple[str, Any]:
    """(version of vLLM, a part of the table): `options`, by name their `kinds` or `choices`, or `tool_call_parsers`, their names."""
    tree = json.loads(resources.files("pipelinerl.engine.vllm").joinpath("options.json").read_text())
    return tree["vllm"], tree[part]


def problems_of_options(
    options: Mapping[str, Any], *, section: str, installed: str | None, own_keys: Mapping[str, str] = OWN_KEYS
) -> Iterator[str]:
    """Say what is wrong with `<section>.options`; `installed` is the version of vLLM here, where there is one.

    An option that the table lacks is let through where another version is installed: that one may have it.
    """
    version, known = pinned("options")
    for name, value in options.items():
        key = f"{section}.options.{name}"
        if name in own_keys:
            yield f"{key} is {own_keys[name]}, which the rest of the run reads, too. Set that."
        elif name in FIXED and value != FIXED[name][0]:
            yield f"{key} is {value!r}, and has to be {FIXED[name][0]}: {FIXED[name][1]}. Leave it out."
        elif name not in known:
            if installed is None or installed.partition("+")[0] == version:
                yield f"{key} is no engine argument of vLLM {version}{nearest(name, known)}"
        elif (wanted := _wanted(value, known[name])) is not None:
            yield f"{key} is {value!r}, expected {wanted} (vLLM {version})"


def problems_of_parser(name: str | None, *, installed: str | None) -> Iterator[str]:
    """Say what is wrong with `data.tool_call_parser`; `installed` is the version of vLLM here, where there is one.

    A name that the table lacks is let through where another version is installed: that one may have it.
    """
    version, known = pinned("tool_call_parsers")
    if name is not None and name not in known and (installed is None or installed.partition("+")[0] == version):
        yield f"data.tool_call_parser is {name!r}, expected a parser of vLLM {version}{nearest(name, known)}: {', '.join(known)}"


def _wanted(value: Any, option: Mapping[str, list[Any]]) -> str | None:
    """Say what the option takes, for a person; None where the value is that."""
    if choices := option.get("choices"):
        return None if value in choices else " or ".join(json.dumps(choice) for choice in choices)
    kinds: list[str] = option["kinds"]
    if not kinds or any(_is(value, kind) for kind in kinds):
        return None
    return " or ".join({"table": "a table", "list": "a list", "str": "text"}.get(kind, kind) for kind in kinds)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "bool"
    return isinstance(value, _KINDS[kind]) and not (isinstance(value, float) and not math.isfinite(value))
