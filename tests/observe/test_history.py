"""The ledger of a run, for a person: one that was damaged is named, with what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.ledger.ledger import Ledger
from pipelinerl.errors import LedgerError
from pipelinerl.observe.history import story_of, summary_of


def test_a_ledger_that_was_damaged_is_named_by_whoever_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path).store.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes(len(whole) - 100))
    for told in (summary_of(tmp_path), story_of(tmp_path, "0:1")):
        with pytest.raises(LedgerError, match=rf"{path} cannot be read: .* It was damaged after it was written: restore it"):
            list(told)
    checked = subprocess.run([sys.executable, "-m", "pipelinerl.checker", str(tmp_path)], capture_output=True, text=True, check=False)
    assert checked.returncode == 1
    assert f"cannot be checked: {path}: " in checked.stderr
    assert "restore it" in checked.stderr
