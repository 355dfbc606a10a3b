"""Recipes of tinker-cookbook 0.6.1, their files unchanged, against a real engine and the real trainer: data and model alone are ours.

Skipped where the cookbook is not installed; `python -m scripts.bench.cookbook --quick` makes its environment, and without `--quick` runs
more recipes, one with a pretrained model.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.recipes.environment import ROOT, has_cookbook

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not has_cookbook(), reason="tinker-cookbook has no environment at runs/tinker"),
]


def test_rl_loop_goes_on_from_what_sl_loop_taught_without_a_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.bench.recipes", str(tmp_path / "work"), "sl_loop", "rl_loop"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr[-6000:]
    found = json.loads((tmp_path / "work" / "found.json").read_text())
    losses = [line["train_mean_nll"] for line in found["sl_loop"]["metrics"]]
    assert losses[-1] < 0.3 * losses[0]
    rewards = [line["reward/total"] for line in found["rl_loop"]["metrics"] if "reward/total" in line]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.6, "cispo has it answer what is rewarded"
    steps = found["sl_loop"]["steps"] + found["rl_loop"]["steps"]
    assert len(steps) == len(losses) + len(rewards)
    assert not sum(step["pipelinerl/unknown_tokens"] for step in steps)
