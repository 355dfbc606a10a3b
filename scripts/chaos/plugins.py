"""Prompts and a reward for runs under faults: endless rows, each with its number, and a reward that takes a moment."""

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
