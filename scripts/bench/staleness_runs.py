"""Measures what staleness costs in seconds: whole runs of the demo at several bounds K, naive and corrected, from one warm start.

Each run is the product as it ships, streaming on this machine; how old its tokens really got is measured and shown, for the bound is only
a bound. The time is from the first span of an engine to the step at which the mean reward of five steps reaches 0.8. It needs a quiet
machine. Every run's figures are a file, so the bench may be interrupted at any moment, or made in pieces (`--budget-s`); `--again` forgets
what was made. How long is left is said before each run.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from pipelinerl.config.file import load
from scripts.bench import harness
from scripts.bench.demo_runs import lines_of, mean, prepare, program, warm_start
from scripts.bench.figure import write_lines
from scripts.bench.pieces import BUDGET, Pieces

Key = tuple[str, int, int]
"""Objective, bound, seed."""
Made = dict[Key, dict[str, Any]]
"""The figures of runs."""
FOLDER = Path("runs/bench-staleness-runs")
BOUNDS = (0, 1, 2, 4, 8, 16)
OBJECTIVES = {
    "uncorrected": '{ objective = "gpg", proximal = "current" }',
    "corrected": "{ objective = { clip_low = 0.2, clip_high = 0.28 } }",
}
"""`algorithm.overrides`; corrected is the demo's own."""
SEEDS = (0, 1)
STEPS = 80
REACHED = 0.8
"""Mean reward of five steps that a run is timed to."""


def measure(arguments: Any) -> harness.Measured | None:
    folder = FOLDER / "quick" if arguments.quick else FOLDER
    if arguments.again or arguments.quick:
        shutil.rmtree(folder, ignore_errors=True)
    wanted: list[Key] = [("corrected", 4, 0)] if arguments.quick else list(itertools.product(OBJECTIVES, BOUNDS, SEEDS))
    pieces = Pieces(folder, wanted, budget_s=arguments.budget_s)
    settings = _warm(folder, quick=arguments.quick)
    while (missing := pieces.missing) and pieces.may_start:
        _say_left(pieces.made, num_left=len(missing))
        turns = harness.in_turns(
            1, {"run": lambda key=missing[0]: harness.median_s(lambda: _run(settings, key, quick=arguments.quick), repetitions=1)}
        )
        wall_s, figures = turns["run"][0]
        pieces.keep(missing[0], figures | {"wall_s": wall_s, "speeds": turns.speeds.values})
    made = pieces.made
    found = _table(made)
    if missing:
        harness.show("staleness-runs, so far", found)
        _say_left(made, num_left=len(missing))
        print(f"staleness-runs: {len(made)} of {len(wanted)} runs made; call again for the others", flush=True)
        return None
    if not arguments.quick:
        write_lines(
            harness.RESULTS / "staleness-seconds.svg",
            {f"corrected, K = {bound}": made["corrected", bound, SEEDS[0]]["curve"] for bound in BOUNDS},
            label="Mean reward over seconds at several staleness bounds",
            x_label="seconds since the first token",
            y_label="mean reward of five steps",
        )
        value = _reached_s(made, 4) / _reached_s(made, 0)
        speeds = harness.Speeds(tuple(speed for run in made.values() for speed in run["speeds"]))
        found.goals.append(harness.at_most("seconds to reward 0.8 at K = 4 over K = 0", value, 1.0, work=harness.Work.CPU, speeds=speeds))
    return found


def _say_left(made: Made, *, num_left: int) -> None:
    """From the runs made so far, start and end included; those without a bound are the slowest, so the first guess is high."""
    if made:
        each_s = float(np.mean([found["wall_s"] for found in made.values()]))
        print(f"staleness-runs: {len(made)} made, {num_left} left, about {num_left * each_s / 60:.0f} min", flush=True)
    else:
        print(f"staleness-runs: {num_left} runs; after the first one it says how long they take", flush=True)


def _table(made: Made) -> harness.Measured:
    rows = []
    for objective, bound in dict.fromkeys((objective, bound) for objective, bound, _ in made):
        runs = _of(made, objective, bound)
        means = {name: float(np.mean([run[name] for run in runs])) for name in ("total_s", "age_mean", "age_max", "last", "area")}
        rows.append(
            {
                "objective": objective,
                "K": bound,
                "s to reward 0.8, each seed": " / ".join(
                    "never" if run["reached_s"] is None else f"{run['reached_s']:.1f}" for run in runs
                ),
                "s in all": means["total_s"],
                "mean age": means["age_mean"],
                "oldest": means["age_max"],
                "reward, last 5 steps": means["last"],
                "area over seconds": means["area"],
            }
        )
    notes = [
        f"up to {len(SEEDS)} runs each, from one warm start; means of them",
        "area: mean reward over the seconds of the run, from its first trained step",
    ]
    return harness.Measured(rows=rows, notes=notes)


def _of(made: Made, objective: str, bound: int) -> list[dict[str, Any]]:
    return [run for (its_objective, its_bound, _), run in made.items() if (its_objective, its_bound) == (objective, bound)]


def _reached_s(made: Made, bound: int) -> float:
    """Mean over the seeds, of the demo's own objective."""
    return float(np.mean([float("inf") if run["reached_s"] is None else run["reached_s"] for run in _of(made, "corrected", bound)]))


def _warm(folder: Path, *, quick: bool) -> Path:
    """The config of all runs, whose model has had the demo's warm start; made once."""
    if not (folder / "warm").exists():
        warm_start(prepare(folder), *(["sft.steps=50"] if quick else []))
        (folder / "warm").touch()
    return folder / "demo.toml"


def _run(settings: Path, key: Key, *, quick: bool) -> dict[str, Any]:
    """Run once and read from its journals how fast its reward rose."""
    objective, bound, seed = key
    folder = settings.parent / "runs"
    overrides = [f"run.folder={json.dumps(str(folder))}", f"run.seed={seed}", f"pipeline.max_staleness={bound}"]
    overrides += [f"trainer.steps={20 if quick else STEPS}", "evaluation.every=0", f"model.path={load(settings).sft_output}"]
    overrides += [f"algorithm.overrides={OBJECTIVES[objective]}"]
    before = set(folder.glob("*"))
    program("pipelinerl", "run", str(settings), *overrides)
    (run_folder,) = set(folder.glob("*")) - before
    lines = lines_of(run_folder)
    trained = lines["step"]
    began = min(line["t"] for line in lines["span"] if line["lane"].startswith("engine"))
    curve = [(line["t"] - began, mean(trained[max(0, number - 4) : number + 1], "reward_mean")) for number, line in enumerate(trained)]
    seconds, rewards = zip(*curve, strict=True)
    return {
        "curve": curve,
        "reached_s": next((at_s for at_s, reward in curve if reward >= REACHED), None),
        "total_s": seconds[-1],
        "steps": len(trained),
        "age_mean": mean(trained, "staleness_mean"),
        "age_max": max(line["staleness_max"] for line in trained),
        "last": rewards[-1],
        "area": float(np.trapezoid(rewards, seconds) / (seconds[-1] - seconds[0])) if len(curve) > 1 else rewards[-1],
    }


if __name__ == "__main__":
    again = {"--again": {"action": "store_true", "help": "forget the runs made before"}}
    harness.run("staleness-runs", measure, options={**BUDGET, **again})
