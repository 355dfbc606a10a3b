"""Do recipes of tinker-cookbook 0.6.1 run unchanged against `pipelinerl serve`, and do they learn?

The recipes' files are the package's own, in an environment of their own (`runs/tinker`, made where it is missing). Their data sets are
generated, of the schemas and under the names that they ask the Hub for, the model lies in a folder, and a network namespace without any
way out holds server and recipes. A byte-level model of 0.4 M random parameters is taught to answer 1, 2 or 3 (`sl_loop`) and rewarded for
1 (`rl_loop`, cispo); DPO prefers 2 over 3, and on-policy distillation has the taught model follow the rewarded one. `math_rl` trains all
weights of the pretrained SmolLM2-135M on sums up to 200. `async_rl` is the cookbook's asynchronous RL on the demo's task, from the demo's
warm start, and has to reach the demo's held-out accuracy (0.99), with prompts of three seeds. Each row of the table is a recipe: the mean
of its figure over the first steps and over the last, and what the server knew of the tokens it was trained on. Each run is a folder: call
again where it was interrupted.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import harness
from scripts.bench.recipes import environment

FOLDER = Path("runs/bench-cookbook")
PARTS = {
    "toy": ["sl_loop", "rl_loop", "dpo", "distillation"],
    "pretrained": ["math_rl"],
    "demo": ["async_rl-10"],
    "demo-11": ["async_rl-11"],
    "demo-12": ["async_rl-12"],
}
"""The model that a server serves -> the recipes that are run against it, one after another."""
FIGURES = {
    "sl_loop": ("train_mean_nll", 1, 0.3, "at most this part of its start"),
    "rl_loop": ("reward/total", 3, 0.3, "at least so much more"),
    "dpo": ("dpo_loss", 2, 0.6, "at most this part of its start"),
    "distillation": ("teacher_kl", 3, 0.5, "at most this part of its start"),
    "async_rl": ("held_out/accuracy", 1, 0.98, "at least at its end"),
    "math_rl": ("env/all/reward/total", 3, 0.1, "at least so much more"),
}
"""Recipe -> the figure it logs, steps it is averaged over at either end, and the goal, set after a first try of the toy recipes."""
KNOWN = ("sampled_tokens", "unknown_tokens", "drifted_tokens", "staleness_max")


def measure(arguments: Any) -> harness.Measured:
    environment.make()
    folder = FOLDER / ("quick" if arguments.quick else "full")
    if arguments.again or arguments.quick:
        shutil.rmtree(folder, ignore_errors=True)
    parts = {"toy": PARTS["toy"][:2]} if arguments.quick else PARTS if arguments.part is None else {arguments.part: PARTS[arguments.part]}
    rows, goals = [], []
    for name, recipes in parts.items():
        if not (found_at := folder / name / "found.json").exists():
            shutil.rmtree(folder / name, ignore_errors=True)
            if name == "pretrained":
                subprocess.run([sys.executable, "examples/make_smollm2.py"], check=True)
            subprocess.run([sys.executable, "-m", "scripts.bench.recipes", str(folder / name), *recipes], check=True)
        for recipe, found in json.loads(found_at.read_text()).items():
            row, goal = _judged(recipe, found)
            rows.append(row)
            goals.append(goal)
    goals.append(harness.at_most("tokens of unknown origin", sum(row["unknown_tokens"] for row in rows), 0))
    return harness.Measured(rows=rows, goals=goals)


def _judged(recipe: str, found: dict[str, Any]) -> tuple[harness.Row, harness.Goal]:
    figure, width, goal, how = FIGURES[recipe.partition("-")[0]]
    values = [line[figure] for line in found["metrics"] if figure in line]
    first, last = (sum(part) / len(part) for part in (values[:width], values[-width:]))
    steps = found["steps"]
    known = {name: int((max if name.endswith("max") else sum)(step[f"pipelinerl/{name}"] for step in steps)) for name in KNOWN}
    row = {"recipe": recipe, "steps": len(steps), "figure": figure, "first": first, "last": last, **known, "seconds": found["seconds"]}
    if how == "at least at its end":
        return row, harness.at_least(f"{recipe}: {figure}", last, goal)
    if how.startswith("at least"):
        return row, harness.at_least(f"{recipe}: gain in {figure}", last - first, goal)
    return row, harness.at_most(f"{recipe}: {figure} over its start", last / first, goal)


if __name__ == "__main__":
    again = {"--again": {"action": "store_true", "help": "make all runs again"}}
    part = {"--part": {"choices": list(PARTS), "help": "the recipes of one model alone"}}
    harness.run("cookbook", measure, works=(), options={**again, **part})
