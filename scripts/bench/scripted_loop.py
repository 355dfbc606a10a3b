#!/usr/bin/env python
"""What does it cost to write the built-in loop as a script? `pipelinerl run` and `examples/scripts/streaming.py`, in turns.

Both stream the demo from one warm-started model, with real engines, a core for the engine and one for the trainer, by the same settings
(`beside/ours.toml`). Speed is samples per second of the steady stretch, the script's over that of the run beside it. That both train the
same is seen in turns (`pipeline.mode = "sync"`), where what an engine samples follows from the seed alone and no race decides what a step
is made of: the rollouts of each step, with their rewards and lengths. `--quick` does this alone.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipelinerl.observe.report.comparison import per_second
from pipelinerl.observe.report.measures import measure as measures_of
from pipelinerl.observe.report.reading import read_tables
from scripts.bench import harness, peers
from scripts.bench.beside import systems

FOLDER = Path("runs/bench-scripted-loop")
SCRIPT = systems.ROOT / "examples" / "scripts" / "streaming.py"
WAYS = {"pipelinerl run": ["-m", "pipelinerl", "run"], "script": [str(SCRIPT)]}
STEPS, SAME_STEPS = 40, 3


def measure(arguments: Any) -> harness.Measured:
    shutil.rmtree(FOLDER, ignore_errors=True)
    same = {way: _steps_of(_run(way, f"trainer.steps={SAME_STEPS}", "pipeline.mode=sync", "pipeline.max_staleness=0")) for way in WAYS}
    num_same = sum(same["script"][step] == same["pipelinerl run"][step] for step in range(SAME_STEPS))
    found = harness.Measured(goals=[harness.at_least(f"first steps with the same rollouts, of {SAME_STEPS}", num_same, SAME_STEPS)])
    lines = sum(bool(line.strip()) for line in SCRIPT.read_text().splitlines())
    found.goals.append(harness.at_most("lines of the script, imports and main included", lines, 60))
    if not arguments.quick:
        rates = harness.in_turns(arguments.rounds, {way: functools.partial(_samples_per_s, way) for way in WAYS})
        found.rows = [{"way": way, "samples/s": " / ".join(f"{rate:.1f}" for rate in each)} for way, each in rates.items()]
        ratio = harness.median_ratio(rates["script"], rates["pipelinerl run"])
        found.goals.append(harness.at_least("samples/s over `pipelinerl run`", ratio, 0.98, work=harness.Work.CPU, speeds=rates.speeds))
    return found


def _run(way: str, *changes: str) -> Path:
    """Run one of the two; return its run folder."""
    folder = FOLDER / f"{len(list(FOLDER.glob('*')))}"
    _, _, _, _, *settings = systems.ours("streaming", peers.task_of(peers.DEMO), seed=0, folder=folder)
    subprocess.run([sys.executable, *WAYS[way], *settings, "pipeline.max_staleness=3", *changes], check=True, stdout=subprocess.DEVNULL)
    (found,) = folder.glob("run-2*")
    return found


def _samples_per_s(way: str) -> float:
    tables = read_tables(_run(way, f"trainer.steps={STEPS}"))
    rate = per_second(tables, measures_of(tables))
    assert rate is not None, "every step was trained"
    return rate


def _steps_of(run_folder: Path) -> dict[int, set[tuple[Any, ...]]]:
    """Return what each step was made of: the rollouts' names, rewards and lengths."""
    steps: dict[int, set[tuple[Any, ...]]] = {}
    with contextlib.closing(sqlite3.connect(f"file:{run_folder / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        for step, *rollout in ledger.execute("SELECT step, rollout_id, reward, num_tokens FROM ended_rollouts WHERE status = 'trained'"):
            steps.setdefault(step, set()).add(tuple(rollout))
    return steps


if __name__ == "__main__":
    harness.run("scripted_loop", measure, options={"--rounds": {"type": int, "default": 2, "help": "runs of each way"}})
