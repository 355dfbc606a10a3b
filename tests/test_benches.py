"""Benches are run by hand: that the code they measure is still there is seen here."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHES = sorted(path.stem for path in (ROOT / "scripts" / "bench").glob("*.py") if "def main()" in path.read_text())


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_finds_everything_it_imports(name: str) -> None:
    assert callable(importlib.import_module(f"scripts.bench.{name}").main)


def test_a_bench_tells_its_options() -> None:
    told = subprocess.run(
        [sys.executable, str(ROOT / "scripts/bench/delta.py"), "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "--quick" in told
    assert "--check" in told
