"""Benches are run by hand: that the code they measure is still there is seen here."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHES = sorted(path.stem for path in (ROOT / "scripts" / "bench").glob("*.py") if "harness.run(" in path.read_text())


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_finds_everything_it_imports(name: str) -> None:
    assert callable(importlib.import_module(f"scripts.bench.{name}").measure)


@pytest.mark.slow
def test_a_bench_tells_its_options() -> None:
    told = subprocess.run(
        [sys.executable, str(ROOT / "scripts/bench/transport.py"), "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "--quick" in told
    assert "--check" in told


def test_the_orchestrator_believes_what_stands_for_its_peers() -> None:
    """Peers that it refuses would never answer in its eyes: the bench would wait until its deadline."""
    measured = "from scripts.bench.transport import _cost; print(_cost(in_flight=32, num_engines=2, groups_per_step=4, num_steps=1))"
    told = subprocess.run([sys.executable, "-c", measured], capture_output=True, text=True, check=True, cwd=ROOT)
    assert float(told.stdout.split()[-1]) > 0
    assert "refused" not in told.stdout + told.stderr
