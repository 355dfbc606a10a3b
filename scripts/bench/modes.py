#!/usr/bin/env python
"""What does each mode make of one config? `pipelinerl compare --modes`, as a user calls it, on the demo and on the long-tailed task.

    python -m scripts.bench.modes                     # the long tail
    python -m scripts.bench.modes --part demo

Both begin with a warm-started model and have real engines, a core for the engine and one for the trainer (`beside/ours.toml`; tasks are
those of `peers.py`, whose warm starts are used where they are there). Each figure is measured, and beside it is what the simulator
foretells of that mode from the runs of the others. Every mode runs once, so small differences between modes are chance.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipelinerl.cli.modes import MODES
from pipelinerl.observe.report.modes import WORDS
from scripts.bench import harness, peers
from scripts.bench.beside import systems

FOLDER = Path("runs/bench-modes")
TASKS = {"demo": peers.DEMO, "long_tail": peers.LONG_TAIL}
STEPS, QUICK_STEPS = 20, 3
"""Enough for figures of the steady stretch, few enough for four runs in seven minutes."""


def measure(arguments: Any) -> harness.Measured:
    quick: bool = arguments.quick
    told = _compared(arguments.part, quick=quick)
    found = harness.Measured(rows=[_row(mode) for mode in told["modes"]], notes=[f"R is a mean reward of {told['reward']:g}"])
    rates = {mode["mode"]: (mode["measured"]["samples_per_s"], mode["foretold"]["samples_per_s"]) for mode in told["modes"]}
    if quick:
        found.goals.append(harness.at_least("modes that trained", len(rates), len(MODES) - 1))  # mixed takes a second engine
        return found
    off = [abs(foretold / rate - 1) for rate, foretold in rates.values() if foretold is not None]
    found.goals.append(harness.at_most(f"error of samples/s foretold, largest of {len(off)}", max(off), 0.1, work=harness.Work.CPU))
    if arguments.part == "long_tail":
        found.goals.append(
            harness.at_least("streaming over sync, samples/s", rates["streaming"][0] / rates["sync"][0], 1.8, work=harness.Work.CPU)
        )
    return found


def _compared(part: str, *, quick: bool) -> dict[str, Any]:
    """Have the command compare the modes of a task, and return what it wrote."""
    task = peers.task_of(TASKS[part])
    folder = FOLDER / part
    shutil.rmtree(folder, ignore_errors=True)
    python, module, program, _, *config = systems.ours("streaming", task, seed=0, folder=folder)
    command = [python, module, program, "compare", "--modes", *config]
    subprocess.run([*command, f"--steps={QUICK_STEPS if quick else STEPS}"], check=True)
    (written,) = folder.glob("*/comparison.json")
    return json.loads(written.read_text())


def _row(mode: dict[str, Any]) -> harness.Row:
    row: harness.Row = {"mode": mode["mode"], "steps": mode["num_steps"]}
    for figure, (words, _) in WORDS.items():
        row[words.replace("{reward:g}", "R")] = mode["measured"][figure]
        row[f"{figure}, foretold"] = "" if mode["foretold"][figure] is None else mode["foretold"][figure]
    return row


if __name__ == "__main__":
    harness.run("modes", measure, options={"--part": {"choices": list(TASKS), "default": "long_tail", "help": "the task"}})
