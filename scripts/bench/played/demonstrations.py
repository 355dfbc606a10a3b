"""Plays games of a package and writes each move as a row: PYTHON demonstrations.py NAME NUMBER OPTIONS, where PYTHON has the package.

Half of the games are played blindly, each number as likely as any; in the others the hints are heeded, and any number that is left is as
likely as any other. Nobody halves what is left. A row's prompt is all that was said before a move, its completion is the move.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

OPENING = "Play.\n"
GAMES: dict[str, tuple[str, str, int, int]] = {
    "textarena": ("pipelinerl.environments.textarena", "TextArena", 1, 20),
    "openenv": ("pipelinerl.environments.openenv", "OpenEnv", 0, 9),
}
"""Name -> module and class of the adapter, least and largest number."""
MAX_MOVES = 6


def rows(name: str, number: int, options: dict[str, Any]) -> list[dict[str, str]]:
    """Return the moves of so many games."""
    module, cls, low, high = GAMES[name]
    game = getattr(importlib.import_module(module), cls)(**options)
    draw, found = random.Random(0), []
    for seed in range(number):
        said, heeds, least, most = OPENING + game.reset(seed=1_000_000 + seed), draw.random() < 0.5, low, high
        for _ in range(MAX_MOVES):
            guess = draw.randint(least, most) if heeds else draw.randint(low, high)
            move = f"[{guess}]"
            found.append({"prompt": said, "completion": move})
            answer, _, done = game.step(move)
            if done:
                break
            said += move + answer
            if "higher" in answer.lower():
                least = max(least, guess + 1)
            elif "lower" in answer.lower():
                most = min(most, guess - 1)
    return found


if __name__ == "__main__":
    for row in rows(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])):
        print(json.dumps(row))
