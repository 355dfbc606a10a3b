"""Prompts and rewards of `custom_reward.toml`. Columns of a prompt's row reach a reward by the names of its parameters."""

from __future__ import annotations

import random
from collections.abc import Iterator


def prompts(seed: int = 0) -> Iterator[dict[str, str]]:
    """Endless rows: a prompt, and the letter that its completion should be made of."""
    draw = random.Random(seed)
    while True:
        letter = draw.choice("abc")
        yield {"prompt": f"{letter}=", "letter": letter}


def share(completion: str, letter: str) -> float:
    """How much of the completion is the row's letter, from 0 to 1."""
    return completion.count(letter) / max(1, len(completion))


def near(completion: str, *, length: int) -> float:
    """1 for a completion of exactly so many characters, less for each one away. `length` is an option of the config."""
    return max(0.0, 1 - abs(len(completion) - length) / length)
