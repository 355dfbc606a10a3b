"""Plays games of a package and writes moves as rows: PYTHON demonstrations.py NAME NUMBER OPTIONS, where PYTHON has the package.

A row's prompt is all that was said before a move, its completion is the move. Each prompt is answered `ANSWERS` times, and the game goes on
from the first answer. Every move is drawn by itself from a family of rules: what RL has to find is among what is shown, and nowhere shown
alone (`worth`).
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
VALUE = re.compile(r"value is (\d\.\d+)")
ANSWERS = 4
"""Moves for each prompt, which a packed row computes once for all of them."""
Heard = Sequence[tuple[str, str]]
"""Each move so far, and what the game said to it; first what it said to begin with, after no move."""


def secretary(draw: random.Random, heard: Heard) -> str:
    """Secretary-v0: take what is above a threshold that is drawn evenly from 0 to 1, for each move anew."""
    return "[accept]" if float(VALUE.findall(heard[-1][1])[-1]) > draw.random() else "[continue]"


def digit(draw: random.Random, heard: Heard) -> str:
    """Guess a digit: half of the time any, else any that the hints have left or, as often, the middle of those."""
    rule = draw.choice(["any", "any", "heed", "halve"])
    least, most = 0, 9
    for move, answer in heard[1:] if rule != "any" else ():
        said = int(move.strip("[]"))
        if "Higher" in answer:
            least = max(least, said + 1)
        else:
            most = min(most, said - 1)
    guess = (least + most) // 2 if rule == "halve" else draw.randint(least, most)
    return f"[{guess}]"


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
