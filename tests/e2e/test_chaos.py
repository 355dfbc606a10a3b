"""The short version of `python -m scripts.chaos`: real processes without a model, killed and stopped at random instants, and judged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rehearsal_under_random_kills_keeps_every_promise(tmp_path: Path):
    command = [sys.executable, "-m", "scripts.chaos", "--quick", "--seed", "1", "--folder", str(tmp_path)]
    chaos = subprocess.run(command, capture_output=True, text=True, check=False)
    assert chaos.returncode == 0, chaos.stdout + chaos.stderr
    assert "every promise was kept" in chaos.stdout
