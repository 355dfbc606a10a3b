"""Our functions on a CUDA device that has no memory and computes nothing: torch's own rules hold there, and no GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretended import build_device

CLAIMS = Path(__file__).parent / "pretended" / "on_a_device"


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_touches_a_gpu_holds_on_a_device_without_memory(tmp_path: Path) -> None:
    """In a process of its own: torch has this device from its first import on. Its report is that of the tests in the folder."""
    device = {"LD_PRELOAD": str(build_device(tmp_path))}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *sorted(map(str, CLAIMS.glob("*.py")))]
    ended = subprocess.run(command, env=os.environ | device, capture_output=True, text=True, check=False, timeout=250)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-1000:]
