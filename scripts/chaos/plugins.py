"""Functions for runs under faults: endless prompts, each a row of its own, and a reward and an environment that take a moment."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any


def prompts(seed: int) -> Iterator[dict[str, Any]]:
    """Six digits to sort, drawn anew for every row."""
    chance = random.Random(seed)
    while True:
        yield {"prompt": "".join(chance.choices("0123456789", k=6)) + "="}


def reward(completion: str) -> float:
    """1 for an even number of characters."""
    time.sleep(0.002)
    return float(len(completion) % 2 == 0)


def reply(turns: list[str]) -> str | None:
    """h or l, and the end where all turns together have a multiple of four characters."""
    time.sleep(0.002)
    num_characters = sum(map(len, turns))
    return None if num_characters % 4 == 0 else "hl"[num_characters % 2]
