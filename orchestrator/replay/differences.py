"""The results of a replay beside the recorded ones: some of them for a person, and all as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SHOWN = 10
"""Differences that are printed; the file holds all of them."""
TOLERANCE = 1e-6
"""Two numbers closer than this are the same: advantages are float32."""


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write objects as lines of JSON."""
    with open(path, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
