"""Prompts, a reward that takes as long as asked, and an environment of three turns, for live runs that are foretold."""

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
    """1 for an even sum of its characters' codes, as likely for a short completion as for a long one; after between a half and three halves
    of `seconds`.
    """
    if seconds:
        time.sleep(seconds * (0.5 + random.random()))
    return float(sum(map(ord, completion)) % 2 == 0)


def reply(turns: list[str]) -> str | None:
    """Three digits after each of two turns."""
    return "123" if len(turns) < 3 else None
