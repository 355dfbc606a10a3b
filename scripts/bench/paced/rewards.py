"""A reward that takes its time, and prompts without end."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any


def prompts(seed: int) -> Iterator[dict[str, Any]]:
    """Six digits, drawn anew for every row."""
    chance = random.Random(seed)
    while True:
        yield {"prompt": "".join(chance.choices("0123456789", k=6)) + "="}


def reward(completion: str, *, seconds: float) -> float:
    """1 for an even number of characters, after between a half and three halves of `seconds`."""
    time.sleep(seconds * (0.5 + random.random()))
    return float(len(completion) % 2 == 0)
