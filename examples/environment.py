"""A game of several turns, for `environment.toml`: the environment names a letter, the model should say it."""

from __future__ import annotations

import random
from collections.abc import Iterator


def prompts(seed: int = 0) -> Iterator[dict[str, str]]:
    """Endless games: the letters that will be asked for, the first of them in the prompt."""
    draw = random.Random(seed)
    while True:
        letters = "".join(draw.choices("abc", k=3))
        yield {"prompt": f"{letters[0]}=", "letters": letters}


def reply(turns: list[str], letters: str) -> str | None:
    """The next letter; None once all were asked for. A pure function: what it says follows from the turns alone."""
    return f"{letters[len(turns)]}=" if len(turns) < len(letters) else None


def reward(turns: list[str], letters: str) -> float:
    """The share of turns in which the model said the letter, from 0 to 1."""
    return sum(letter in turn for letter, turn in zip(letters, turns, strict=False)) / len(letters)
