"""The page about GPUs names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_of_the_nineteen_has_a_test_that_there_is() -> None:
    page = (ROOT / "docs/start/gpu.md").read_text()
    (section,) = re.findall(r"^## What stood in the way\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 19
    for row, before in zip(rows, ["", *rows], strict=False):
        named = re.findall(r"`(\w+/\w+\.py)::(\w+)`", before if "| the same |" in row else row)
        assert named, row
        for path, name in named:
            assert f"\ndef {name}(" in (ROOT / "tests" / path).read_text(), f"{path}::{name}"
