"""`docs/config.md` is what the code says."""

from __future__ import annotations

from pathlib import Path

from pipelinerl.config.file import known_keys
from pipelinerl.config.reference import UNITS, markdown

DOCS = Path(__file__).parents[2] / "docs"


def test_the_config_reference_is_current():
    assert (DOCS / "config.md").read_text() == markdown(), "run `pipelinerl keys --markdown > docs/config.md`"


def test_it_names_every_key_once_with_type_default_unit_and_meaning():
    lines = [line for line in markdown().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")] for line in lines]
    assert [row[0].strip("`") for row in cells] == list(known_keys())
    assert all(len(row) == 5 and all(row[:3]) and row[4] for row in cells)
    by_key = {row[0].strip("`"): row[1:] for row in cells}
    assert by_key["trainer.steps"][:2] == ["integer > 0", "`100`"]
    assert by_key["model.path"][:2] == ["path", "required"]
    units = {key: row[2] for key, row in by_key.items()}
    assert (units["trainer.steps"], units["engine.silent_after_s"], units["pipeline.queue_bytes"]) == ("steps", "s", "bytes")
    assert units["lora.alpha"] == units["model.path"] == ""
    last_names = {key.rpartition(".")[2] for key in by_key}
    assert UNITS.keys() <= last_names, "a key that is gone keeps its unit"
