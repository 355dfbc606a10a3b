"""Six digits in ascending order, each written six times, in three steps. A warm start teaches the demo's behaviours, RL rewards one.

Every digit stands there six times so that a step takes longer to write than to score, as with models of a real size.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from pipelinerl.demo.sort_digits import BEHAVIOURS

NUM_DIGITS = 6
STEP_DIGITS = 2
TIMES = 6
SEPARATOR = "="
"""Stands between steps, and after the prompt."""


def train_prompts(seed: int = 0) -> Iterator[dict[str, str]]:
    """Endless prompts, each with the answer that is rewarded."""
    draw = random.Random(f"train {seed}")
    while True:
        yield _row(draw)


def held_out_prompts() -> list[dict[str, str]]:
    """Always the same. Of 10^6 prompts a few may be met in training, too."""
    draw = random.Random("held out")
    return [_row(draw) for _ in range(256)]


def demonstrations(seed: int = 0) -> Iterator[dict[str, str]]:
    """Each prompt four times, with a behaviour each."""
    draw = random.Random(f"demonstrations {seed}")
    while True:
        digits = _digits(draw)
        for behave in BEHAVIOURS:
            yield {"prompt": digits + SEPARATOR, "completion": in_steps(behave(digits))}


def reward(completion: str, answer: str) -> float:
    """1.0 for exactly the answer."""
    return float(completion == answer)


def in_steps(digits: str) -> str:
    """The digits as a completion."""
    steps = (digits[start : start + STEP_DIGITS] for start in range(0, len(digits), STEP_DIGITS))
    return SEPARATOR.join("".join(digit * TIMES for digit in step) for step in steps)


def _row(draw: random.Random) -> dict[str, str]:
    digits = _digits(draw)
    return {"prompt": digits + SEPARATOR, "answer": in_steps(BEHAVIOURS[0](digits))}


def _digits(draw: random.Random) -> str:
    return "".join(draw.choices("0123456789", k=NUM_DIGITS))
