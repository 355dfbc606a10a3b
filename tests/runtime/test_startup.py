"""Marks of a process's start."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.observe.journal import Journal
from pipelinerl.observe.lines import read_journals
from pipelinerl.runtime import startup


@pytest.fixture(autouse=True)
def no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_marks", [])


def written(folder: Path) -> list[dict[str, Any]]:
    journal = Journal(folder, "engine-0")
    startup.write(journal)
    journal.close()
    return read_journals(folder)


def test_marks_are_written_once_in_their_order(tmp_path: Path) -> None:
    before = time.time()
    with startup.mark("imports", since_s=before - 5.0):
        pass
    with startup.mark("loads the model"):
        pass
    first, second = written(tmp_path)
    assert [first["kind"], first["what"], second["what"]] == ["startup", "imports", "loads the model"]
    assert first["start"] == before - 5.0
    assert before <= second["start"] <= second["end"] <= time.time()
    assert len(written(tmp_path)) == 2, "a second journal line of each would count it twice"


def test_what_failed_leaves_no_mark(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), startup.mark("imports"):
        raise RuntimeError("no such package")
    assert written(tmp_path) == []


@pytest.mark.process
def test_a_process_knows_when_it_began() -> None:
    began = time.time()
    code = "import time; time.sleep(0.3); from pipelinerl.runtime.startup import begun_s; print(begun_s())"
    found = float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert began - 0.05 <= found < began + 0.25
