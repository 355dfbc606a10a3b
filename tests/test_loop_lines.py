"""What the page on scripts says of the lines of loops is what was counted, and our own are counted again."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.loop_lines import LOOPS, own_lines

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "controller.md").read_text()


def test_lines_of_loops_are_as_they_were_counted_and_the_page_says_them() -> None:
    stored = json.loads((ROOT / "scripts" / "loop_lines.json").read_text())
    assert stored.keys() == LOOPS.keys()
    for loop, (script, _, _) in LOOPS.items():
        figures = stored[loop]
        assert figures["here"] == own_lines(script), f"{script}.py has changed: run python -m scripts.loop_lines"
        assert f"| {figures['here']} (`{script}.py`" in PAGE
        for name, num in (figures["trl"] | figures["verl"]).items():
            words = (f"`{name}` {num}", f"`{name.partition('.')[2]}` {num}")
            assert any(one in PAGE for one in words), (loop, words)
