"""Compares mathematical answers: `math-verify` (extra `rewards`) parses LaTeX and plain expressions, and sympy compares them."""

from __future__ import annotations

import logging
from typing import Any

from pipelinerl.errors import ConfigError

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ConfigError("the math reward needs math-verify: pip install 'pipelinerl[rewards]'") from error

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns on every call that it has no time limit; the worker has one


def math_equal(completion: str, answer: object) -> float:
    """Return 1.0 where the last answer in the completion (boxed, or the last expression) equals `answer` mathematically; else 0.0.

    Raises `ValueError` where `answer` itself is no mathematical expression, because no completion could satisfy such a row.
    The deadline of the reward ends a comparison that never ends by itself; a library's own alarm would be lost in native code.
    """
    gold = _parse(str(answer))
    if not gold:
        gold = _parse(f"${answer}$")
    if not gold:
        raise ValueError(f"the answer {answer!r} is no mathematical expression; a completion cannot be compared with it")
    return float(verify(gold, _parse(completion), timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    return parse(text, parsing_timeout=0)
