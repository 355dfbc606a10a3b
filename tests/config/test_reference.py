"""`docs/config.md` is what the code says."""

from __future__ import annotations

from pathlib import Path

from pipelinerl.config.file import known_keys
from pipelinerl.config.reference import markdown

DOCS = Path(__file__).parents[2] / "docs"


def test_the_config_reference_is_current():
    assert (DOCS / "config.md").read_text() == markdown(), "run `pipelinerl keys --markdown > docs/config.md`"


def test_it_names_every_key_once_with_type_default_and_meaning():
    lines = [line for line in markdown().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")] for line in lines]
    assert [row[0].strip("`") for row in cells] == list(known_keys())
    assert all(len(row) == 4 and all(row) for row in cells)
    by_key = {row[0].strip("`"): row[1:] for row in cells}
    assert by_key["trainer.steps"][:2] == ["integer > 0", "`100`"]
    assert by_key["model.path"][:2] == ["path", "required"]
