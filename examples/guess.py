"""A game with state, for `guess.toml`: the environment draws a digit, and says whether it is higher or lower than the model's guess."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator


def prompts() -> Iterator[dict[str, object]]:
    """Endless games. Siblings share a row, hence the seed: they are to find the same digit."""
    return ({"prompt": "game=", "seed": seed} for seed in itertools.count())


class Guess:
    """One game. It lives in a process of its own from `reset` to its end."""

    def __init__(self, highest: int = 9) -> None:
        self._low, self._high = 0, highest

    def reset(self, seed: int) -> str:
        """Draw the digit; what is returned stands behind the prompt."""
        self._digit = random.Random(seed).randint(self._low, self._high)
        return "guess="

    def step(self, message: str) -> tuple[str | None, float, bool]:
        """What the model sees next, the reward of its turn, and whether the game is over."""
        said = message.strip("=")
        if not said.isdigit() or len(said) > 1:
            return None, 0.0, True  # no less than a turn that never ends, or the model would learn not to end it
        guess = int(said)
        if guess == self._digit:
            return None, 1.0, True
        was_possible = self._low <= guess <= self._high
        if guess < self._digit:
            self._low = max(self._low, guess + 1)
        else:
            self._high = min(self._high, guess - 1)
        return "higher=" if guess < self._digit else "lower=", 0.1 if was_possible else 0.0, False
