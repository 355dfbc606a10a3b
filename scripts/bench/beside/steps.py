"""What a peer's run leaves for the bench: one line a step, with the same fields for every system. Not part of what a user writes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Steps:
    """Writes the steps of one run. `parts` are seconds of the step by what they were spent on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rewards: list[float] = []
        self._lengths: list[int] = []

    def sampled(self, rewards: Sequence[float], lengths: Sequence[int]) -> None:
        """Note samples that the step under way trains on, and the tokens of each, its end included."""
        self._rewards += rewards
        self._lengths += lengths

    def trained(self, parts: dict[str, float]) -> None:
        line = {
            "t": time.time(),
            "reward_mean": sum(self._rewards) / len(self._rewards),
            "lengths": self._lengths,
            "parts": parts,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._rewards, self._lengths = [], []


def settings() -> dict[str, Any]:
    """What the bench tells a peer, from the file that its command line names."""
    return json.loads(Path(sys.argv[1]).read_text())
