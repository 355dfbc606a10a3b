"""docs/start/gpu.md says of each path on a GPU how far it was tried: in one of three words, by a test that is there."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.vllm_next import STORED, breaks, table

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "start" / "gpu.md").read_text()
HOW_FAR = {"run", "in pretence", "read"}


def rows() -> list[list[str]]:
    section = PAGE.partition("## What ran, and what did not")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if line.startswith("| ")][2:]


def test_each_path_was_run_or_run_in_pretence_or_read() -> None:
    found = rows()
    assert {row[1] for row in found} == HOW_FAR
    assert [row[0] for row in found if len(row) != 4] == []


def test_the_tests_that_are_named_are_there_and_pretence_is_called_pretence() -> None:
    named = {row[0]: (row[1], row[3].strip("`")) for row in rows()}
    assert [file for _, file in named.values() if file and not (TESTS.parent / file).is_file()] == []
    assert [path for path, (how_far, file) in named.items() if not file and how_far != "read"] == [], "what ran has a test"
    assert [
        path for path, (how_far, file) in named.items() if ("pretended" in file or "on_cuda" in file) and how_far != "in pretence"
    ] == []
    pretended = {f"tests/pretended/on_a_device/{path.name}" for path in (TESTS / "pretended" / "on_a_device").glob("*.py")}
    assert pretended <= {file for _, file in named.values()}


def test_what_other_releases_would_break_is_what_was_stored() -> None:
    stored = json.loads(STORED.read_text())
    assert table(stored) in PAGE
    assert any(breaks(one) for one in stored.values())
