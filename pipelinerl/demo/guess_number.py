"""A game of several turns: the model guesses a digit, and is told whether the number is higher or lower, until it is right.

Beside `sort_digits`, and for its model: the characters are one token each. An example of an environment,

    [data]
    source = "pipelinerl.demo.guess_number:prompts"
    [environment]
    function = "pipelinerl.demo.guess_number:reply"
    max_turns = 4
    [[reward]]
    function = "pipelinerl.demo.guess_number:reward"

in which halving what is left finds any number in four turns at most.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

HIGHER, LOWER = "h", "l"


def prompts(seed: int = 0) -> Iterator[dict[str, object]]:
    """Endless games."""
    draw = random.Random(f"guess {seed}")
    while True:
        yield {"prompt": "guess=", "number": draw.randrange(10)}


def reply(turns: Sequence[str], number: int, **_: object) -> tuple[str, str] | None:
    """h or l, and the name of the state: which digits are left. None once the number is found, or where a turn has no digit."""
    guesses = [guess_of(said) for said in turns]
    if guesses[-1] is None or guesses[-1] == number:
        return None
    low = max((guess + 1 for guess in guesses if guess is not None and guess < number), default=0)
    high = min((guess - 1 for guess in guesses if guess is not None and guess > number), default=9)
    return (HIGHER if guesses[-1] < number else LOWER), f"{low} to {high}"


def reward(turns: Sequence[str], number: int, **_: object) -> float:
    """1.0 for the number at once, 0.1 less for each turn more; 0.0 where it was not found."""
    return 1.0 - 0.1 * (len(turns) - 1) if guess_of(turns[-1]) == number else 0.0


def guess_of(said: str) -> int | None:
    """The last digit of what was said; None where there is none."""
    return next((int(character) for character in reversed(said) if character in "0123456789"), None)
