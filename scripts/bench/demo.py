"""Does the demo learn, and how fast? Three seeds of `pipelinerl demo`, each from a fresh model, judged on 256 held-out prompts.

Greedy accuracy before RL (the warm-started model) and after it, the seconds until the first step is trained, and those of the whole run.
Each seed draws its own model, prompts, demonstrations and samples; the held-out prompts are always the same and never trained on.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import harness
from scripts.bench.demo_runs import lines_of, mean, program

FOLDER = Path("runs/bench-demo")


def measure(arguments: Any) -> harness.Measured:
    seeds, overrides = ([0], ["sft.steps=50", "trainer.steps=20"]) if arguments.quick else ([0, 1, 2], [])
    rows = [_run(seed, overrides) for seed in seeds]
    gain = min(row["held-out after"] - row["held-out before"] for row in rows)
    goals = [
        harness.at_least("worst gain on held-out prompts", gain, 0.05 if arguments.quick else 0.5),
        harness.at_most("slowest first step, s", max(row["first step s"] for row in rows), 30, **harness.SECONDS),
        harness.at_most("slowest warm start plus RL, s", max(row["warm start s"] + row["RL s"] for row in rows), 300, **harness.SECONDS),
    ]
    notes = ["RL mostly selects one of the four behaviours that the warm start taught; see pipelinerl/demo/sort_digits.py"]
    return harness.Measured(rows=rows, goals=goals, notes=notes)


def _run(seed: int, overrides: list[str]) -> harness.Row:
    harness.watch.mark()
    folder = FOLDER / f"seed-{seed}"
    started = time.time()
    program("pipelinerl", "demo", "--seed", str(seed), "--folder", str(folder), *overrides)
    run_folder = max(folder.glob("demo-2*"), key=lambda path: path.stat().st_mtime)
    lines = lines_of(run_folder)
    launched = (run_folder / "config.json").stat().st_mtime
    return {
        "seed": seed,
        "held-out before": lines["evaluation"][0]["reward_mean"],
        "held-out after": lines["evaluation"][-1]["reward_mean"],
        "reward, last 10 steps": mean(lines["step"][-10:], "reward_mean"),
        "first step s": lines["step"][0]["t"] - launched,
        "warm start s": launched - started,
        "RL s": max(found[-1]["t"] for found in lines.values()) - launched,
        "pause p50 ms": 1e3 * statistics.median_high(line["pause_s"] for line in lines["swap"]),
    }


if __name__ == "__main__":
    harness.run("demo", measure)
