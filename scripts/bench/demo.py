"""Does the demo learn, and how fast? Three seeds of `pipelinerl demo`, each from a fresh model, judged on 256 held-out prompts.

Greedy accuracy before RL (the warm-started model) and after it, the seconds until the first step is trained, and those of the whole run.
Each seed draws its own model, prompts, demonstrations and samples; the held-out prompts are always the same and never trained on.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipelinerl.observe.lines import read_journals
from scripts.bench import harness

FOLDER = Path("runs/bench-demo")


def main() -> None:
    arguments = harness.options(__doc__ or "").parse_args()
    seeds, overrides = ([0], ["sft.steps=50", "trainer.steps=20"]) if arguments.quick else ([0, 1, 2], [])
    found = [_run(seed, overrides) for seed in seeds]
    columns = ["seed", "held-out before", "held-out after", "reward, last 10 steps", "first step s", "warm start s", "RL s", "pause p50 ms"]
    goals = [
        harness.Goal(
            name="worst gain on held-out prompts", value=min(row[2] - row[1] for row in found), goal=0.05 if arguments.quick else 0.5
        ),
        harness.Goal(name="slowest first step, s", value=max(row[4] for row in found), goal=30, at_least=False),
        harness.Goal(name="slowest warm start plus RL, s", value=max(row[5] + row[6] for row in found), goal=300, at_least=False),
    ]
    notes = ["RL mostly selects one of the four behaviours that the warm start taught; see pipelinerl/demo/sort_digits.py"]
    harness.finish("demo", arguments=arguments, columns=columns, rows=found, goals=goals, notes=notes)


def _run(seed: int, overrides: list[str]) -> list[float]:
    folder = FOLDER / f"seed-{seed}"
    started = time.time()
    subprocess.run([sys.executable, "-m", "pipelinerl", "demo", "--seed", str(seed), "--folder", str(folder), *overrides], check=True)
    run_folder = max(folder.glob("demo-2*"), key=lambda path: path.stat().st_mtime)
    lines = read_journals(run_folder)
    launched = (run_folder / "config.json").stat().st_mtime
    steps = [line for line in lines if line["kind"] == "step"]
    evaluations = [line["reward_mean"] for line in lines if line["kind"] == "evaluation"]
    pauses = sorted(line["pause_s"] for line in lines if line["kind"] == "swap")
    return [
        seed,
        evaluations[0],
        evaluations[-1],
        sum(line["reward_mean"] for line in steps[-10:]) / len(steps[-10:]),
        steps[0]["t"] - launched,
        launched - started,
        lines[-1]["t"] - launched,
        pauses[len(pauses) // 2] * 1e3,
    ]


if __name__ == "__main__":
    main()
