"""Reward functions that come with the system, named in a config as `pipelinerl.scorer.builtin:exact_match`."""

from __future__ import annotations

import re


def exact_match(completion: str, *, answer: object) -> float:
    """1.0 where the completion is the row's `answer`, white space around either aside; else 0.0."""
    return float(completion.strip() == str(answer).strip())


def regex_match(completion: str, *, pattern: str) -> float:
    """1.0 where the row's `pattern` (Python `re` syntax) is found in the completion; else 0.0. Raises `re.error` on a bad pattern."""
    return float(re.search(pattern, completion) is not None)


def length_penalty(completion: str, *, num_tokens: int, max_tokens: int) -> float:
    """0.0 up to four fifths of the run's longest completion, then falling linearly to -1.0 (DAPO soft overlong punishment).

    For other bounds call `overlong_penalty` from a function of your own.
    """
    del completion  # the length counts in tokens, not in characters
    return overlong_penalty(num_tokens, max_tokens=max_tokens, buffer_tokens=max(1, max_tokens // 5))


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> float:
    """min(-(len - (Lmax - Lbuf)) / Lbuf * factor, 0) (DAPO, arXiv 2503.14476, equation 13; there Lmax 20480 and Lbuf 4096)."""
    return min(-(num_tokens - (max_tokens - buffer_tokens)) / buffer_tokens * factor, 0.0)
