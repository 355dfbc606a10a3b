"""Reward functions that come with the system, named in a config as `pipelinerl.rewards.functions.builtin:exact_match`.

Functions that need a library or a sandbox are in modules of their own, which are imported when a config names them.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

_ELSEWHERE = {
    "math": ("pipelinerl.rewards.functions.math_answer", "math_equal"),
    "json_schema": ("pipelinerl.rewards.functions.schema", "fits_schema"),
    "code": ("pipelinerl.rewards.functions.code", "passes_tests"),
    "judge": ("pipelinerl.rewards.functions.judge", "ask_judge"),
    "reasoning_gym": ("pipelinerl.rewards.functions.gym_score", "score_answer"),
}


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, function = _ELSEWHERE[name]
    return getattr(importlib.import_module(module), function)


def exact_match(completion: str, *, answer: object) -> float:
    """Return 1.0 where the completion is the row's `answer`, apart from white space around either; else 0.0."""
    return float(completion.strip() == str(answer).strip())


def regex_match(completion: str, *, pattern: str) -> float:
    """Return 1.0 where the row's `pattern` (Python `re`) is found in the completion; else 0.0. Raises `re.error` on a bad pattern."""
    return float(re.search(pattern, completion) is not None)


def length_penalty(completion: str, *, num_tokens: int, max_tokens: int, buffer_tokens: int | None = None, factor: float = 1.0) -> float:
    """Return DAPO's soft overlong punishment: 0.0 up to `buffer_tokens` below the run's `max_tokens`, then falling linearly to -`factor`.

    `buffer_tokens` and `factor` are options; by default, `buffer_tokens` is a fifth of `max_tokens`, as in the paper.
    """
    del completion  # the length counts in tokens, not in characters
    buffer_tokens = max(1, max_tokens // 5) if buffer_tokens is None else buffer_tokens
    return overlong_penalty(num_tokens, max_tokens=max_tokens, buffer_tokens=buffer_tokens, factor=factor)


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> float:
    """Return min(-(len - (Lmax - Lbuf)) / Lbuf * factor, 0) (DAPO, arXiv 2503.14476, equation 13; there Lmax 20480 and Lbuf 4096)."""
    return min(-(num_tokens - (max_tokens - buffer_tokens)) / buffer_tokens * factor, 0.0)
