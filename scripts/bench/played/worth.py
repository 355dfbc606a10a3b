"""What policies are worth in the games that `games.py` trains, by arithmetic: none of these numbers is sampled.

Secretary-v0 draws five values evenly from 0 to 1, and pays 1 for taking the largest of them; the last has to be taken. The game behind the
OpenEnv server draws one of ten digits, and pays 1 for it and -0.1 for each other guess, eight guesses at most.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

NUM_VALUES = 5
NUM_DIGITS, NUM_GUESSES, WRONG = 10, 8, -0.1
GRID = 2_000
"""Cells of an integral over values; with twice as many the fifth decimal stays."""


def blind_secretary() -> float:
    """Take any value, whatever it is."""
    return 1.0 / NUM_VALUES


def ranks_alone(num: int = NUM_VALUES) -> float:
    """Pass some values, then take the first that is larger than all before: the best that can be done without reading how large one is."""
    return max(skipped / num * sum(1.0 / place for place in range(skipped, num)) for skipped in range(1, num))


def one_threshold(least: float, num: int = NUM_VALUES) -> float:
    """Take the first value above `least`: it wins where none after it is larger."""
    taken = sum(least**place * (1.0 - least ** (num - place)) / (num - place) for place in range(num))
    return taken + least**num / num  # none was above it, and the last is the largest


def any_threshold(num: int = NUM_VALUES) -> float:
    """Take a value above a threshold that is drawn evenly from 0 to 1 for each value anew: as likely as the value is large."""
    middles = [(cell + 0.5) / GRID for cell in range(GRID)]
    passed = [value - value**2 / 2 for value in middles]  # an earlier one is smaller than `value`, and was not taken
    taken = [
        sum(below**place * value ** (num - 1 - place) for place in range(num - 1)) for value, below in zip(middles, passed, strict=True)
    ]
    won = [value * often + below ** (num - 1) for value, often, below in zip(middles, taken, passed, strict=True)]
    return sum(won) / GRID


def best_secretary(num: int = NUM_VALUES) -> float:
    """Take a value where it is the largest so far, and more likely to stay so than a later one is to win."""
    middles = [(cell + 0.5) / GRID for cell in range(GRID)]
    wins = [0.0] * GRID  # by the largest so far, with no value left
    for left in range(num):  # values after the one that is looked at
        above = 0.0
        now = list[float]()
        for largest, later in zip(reversed(middles), reversed(wins), strict=True):
            above += max(largest**left, later) / GRID
            now.append((largest - 0.5 / GRID) * later + above)
        wins = now[::-1]
    return wins[0]


def blind_digit(guesses: int = NUM_GUESSES) -> float:
    """Guess any digit, each time as likely."""
    found = 1.0 / NUM_DIGITS
    return found + (1.0 - found) * (WRONG + blind_digit(guesses - 1)) if guesses else 0.0


def heeding_digit() -> float:
    """Guess any digit that the hints have left."""
    return _digit(lambda returns: sum(returns) / len(returns))


def best_digit() -> float:
    """Guess the digit that is worth most: halve what is left."""
    return _digit(max)


def shown_digit(guesses: int = NUM_GUESSES) -> float:
    """Guess as the demonstrations do: half of the time any digit, else any that the hints have left or, as often, their middle."""

    @functools.cache
    def worth(num: int, left: int) -> float:
        if not num or not left:
            return 0.0
        heeded = [guessed(guess, num, left) for guess in range(num)]
        inside = num / NUM_DIGITS
        blind = inside * sum(heeded) / num + (1.0 - inside) * (WRONG + worth(num, left - 1))
        return blind / 2 + sum(heeded) / num / 4 + heeded[(num - 1) // 2] / 4

    def guessed(guess: int, num: int, left: int) -> float:
        return (1.0 + sum(side * (WRONG + worth(side, left - 1)) for side in (guess, num - 1 - guess))) / num

    return worth(NUM_DIGITS, guesses)


def _digit(choose: Callable[[list[float]], float]) -> float:
    @functools.cache
    def worth(num: int, guesses: int) -> float:
        if not num or not guesses:
            return 0.0
        sides = [[(side, side / num) for side in (guess, num - 1 - guess)] for guess in range(num)]
        return choose([1.0 / num + sum(part * (WRONG + worth(side, guesses - 1)) for side, part in both) for both in sides])

    return worth(NUM_DIGITS, NUM_GUESSES)


def told() -> list[str]:
    """A line for each game."""
    return [
        f"Secretary-v0: blind {blind_secretary():.3f}, as shown {any_threshold():.3f}, by ranks alone at most {ranks_alone():.3f}, "
        f"the first value above 0.7 {one_threshold(0.7):.3f}, best {best_secretary():.3f}",
        f"the digit: blind {blind_digit():.3f}, as shown {shown_digit():.3f}, heeding the hints {heeding_digit():.3f}, "
        f"best {best_digit():.3f}",
    ]


if __name__ == "__main__":
    print("\n".join(told()))
