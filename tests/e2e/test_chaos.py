"""The short version of `python -m scripts.chaos`: real processes without a model, killed and stopped at random instants, and judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rehearsal_under_random_kills_keeps_every_promise(tmp_path: Path):
    command = [sys.executable, "-m", "scripts.chaos", "--quick", "--seed", "1", "--folder", str(tmp_path)]
    chaos = subprocess.run(command, capture_output=True, text=True, check=False)
    assert chaos.returncode == 0, chaos.stdout + chaos.stderr
    assert "every promise was kept" in chaos.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_lie_of_a_peer_with_a_key_is_refused_as_what_it_is_and_a_forger_is_named_while_processes_are_killed(tmp_path: Path):
    """Who tells which lies, and what becomes of each, is in `scripts.chaos.lies` and `.account`."""
    command = [sys.executable, "-m", "scripts.chaos", "--seed", "3", "--liars", "0.1", "--pause-s", "2", "--folder", str(tmp_path)]
    command += ["--record", str(record := tmp_path / "record.jsonl"), "orchestrator=3", "engine=2"]
    chaos = subprocess.run(command, capture_output=True, text=True, check=False)
    assert chaos.returncode == 0, chaos.stdout + chaos.stderr
    assert "every promise was kept" in chaos.stdout
    lies = json.loads(record.read_text())["lies"]
    refused = {name for name, counts in lies["counts"].items() if counts.get("refused")}
    assert {name.partition(":")[0] for name in refused} == {"engine", "scorer", "trainer"}
    assert len(refused) >= 8, refused
    assert lies["named"] >= 1
