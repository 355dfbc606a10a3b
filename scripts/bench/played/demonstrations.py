"""Plays games of a package and writes moves as rows: PYTHON demonstrations.py NAME NUMBER OPTIONS, where PYTHON has the package.

A row's prompt is all that was said before a move, its completion is the move. Each prompt is answered `ANSWERS` times, and the game goes on
from the first answer. Half of all moves are blind, the others follow a rule that is worth more and far from the best (`worth`).
"""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

OPENING = "Play.\n"
NUM_VALUES, VALUE = 5, re.compile(r"value is (\d\.\d+)")
ANSWERS = 4
"""Moves for each prompt, which a packed row computes once for all of them."""
Heard = Sequence[tuple[str, str]]
"""Each move so far, and what the game said to it; first what it said to begin with, after no move."""


def secretary(draw: random.Random, heard: Heard) -> str:
    """Secretary-v0: take one of the values that are left, each as likely; or take what is above 0.5."""
    if draw.random() < 0.5:
        is_taken = draw.random() < 1.0 / (NUM_VALUES - len(heard) + 1)
    else:
        is_taken = float(VALUE.findall(heard[-1][1])[-1]) > 0.5
    return "[accept]" if is_taken else "[continue]"


def digit(draw: random.Random, heard: Heard) -> str:
    """Guess a digit: any, or any that the hints have left. Nobody halves what is left."""
    least, most = 0, 9
    if draw.random() < 0.5:
        for move, answer in heard[1:]:
            guess = int(move.strip("[]"))
            if "Higher" in answer:
                least = max(least, guess + 1)
            else:
                most = min(most, guess - 1)
    return f"[{draw.randint(least, most)}]"


PLAYERS: dict[str, Callable[[random.Random, Heard], str]] = {"secretary": secretary, "openenv": digit}
ADAPTERS = {
    "secretary": ("pipelinerl.environments.textarena", "TextArena"),
    "openenv": ("pipelinerl.environments.openenv", "OpenEnv"),
}
"""Game -> module and class of its adapter."""


def rows(name: str, number: int, options: dict[str, Any]) -> list[dict[str, str]]:
    """Return the moves of so many games."""
    module, cls = ADAPTERS[name]
    game = getattr(importlib.import_module(module), cls)(**options)
    draw, found = random.Random(0), list[dict[str, str]]()
    for seed in range(number):
        heard, done = [("", game.reset(seed=1_000_000 + seed))], False
        while not done:
            said = OPENING + "".join(move + answer for move, answer in heard)
            moves = [PLAYERS[name](draw, heard) for _ in range(ANSWERS)]
            found += [{"prompt": said, "completion": move} for move in moves]
            answer, _, done = game.step(moves[0])
            heard.append((moves[0], answer))
    return found


if __name__ == "__main__":
    for row in rows(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])):
        print(json.dumps(row))
