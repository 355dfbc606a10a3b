"""Measures what staleness costs in seconds: whole runs of the demo at several bounds K, naive and corrected, from one warm start.

Each run is the product as it ships, streaming on this machine; how old its tokens really got is measured and shown, for the bound is only
a bound. The time is from the first span of an engine to the step at which the mean reward of five steps reaches 0.8. It needs a quiet
machine. Every run's figures are a file, so the bench may be interrupted at any moment, or made in pieces: `--budget-s 500` starts no run
after 500 s, and the next call goes on with what is missing; `--again` forgets what was made. How long is left is said before each run.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from pipelinerl.config.file import load
from pipelinerl.demo.settings import demo_config, make_demo_model
from pipelinerl.observe.lines import read_journals
from scripts.bench import harness
from scripts.bench.figure import write_lines

Key = tuple[str, int, int]
"""Objective, bound, seed."""
Made = dict[Key, dict[str, Any]]
"""The figures of every run made so far."""
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


def main() -> None:
    parser = harness.options(__doc__ or "")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no run after so many seconds; call again to go on")
    parser.add_argument("--again", action="store_true", help="forget the runs made before")
    arguments = parser.parse_args()
    folder = FOLDER / "quick" if arguments.quick else FOLDER
    if arguments.again or arguments.quick:
        shutil.rmtree(folder, ignore_errors=True)
    wanted: list[Key] = [("corrected", 4, 0)] if arguments.quick else list(itertools.product(OBJECTIVES, BOUNDS, SEEDS))
    steps = 20 if arguments.quick else STEPS
    end = time.monotonic() + arguments.budget_s
    settings = _warm(folder, quick=arguments.quick)
    missing = [key for key in wanted if not _path(folder, *key).exists()]
    for number, (objective, bound, seed) in enumerate(missing):
        if time.monotonic() >= end:
            break
        _say_left(_made(folder, wanted), num_left=len(missing) - number)
        began = time.monotonic()
        found = _run(settings, folder=folder / "runs", objective=objective, bound=bound, seed=seed, steps=steps)
        _keep(found | {"wall_s": time.monotonic() - began}, _path(folder, objective, bound, seed))
    made = _made(folder, wanted)
    _show(made, num_missing=len(wanted) - len(made), arguments=arguments)


def _made(folder: Path, wanted: list[Key]) -> Made:
    return {key: json.loads(_path(folder, *key).read_text()) for key in wanted if _path(folder, *key).exists()}


def _keep(found: dict[str, Any], path: Path) -> None:
    """Write a run's figures whole or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(found))
    draft.replace(path)


def _say_left(made: Made, *, num_left: int) -> None:
    """From the runs made so far, start and end included; those without a bound are the slowest, so the first guess is high."""
    if made:
        each_s = float(np.mean([found["wall_s"] for found in made.values()]))
        print(f"staleness-runs: {len(made)} made, {num_left} left, about {num_left * each_s / 60:.0f} min", flush=True)
    else:
        print(f"staleness-runs: {num_left} runs; after the first one it says how long they take", flush=True)


def _show(made: Made, *, num_missing: int, arguments: Any) -> None:
    columns = [
        "objective",
        "K",
        "s to reward 0.8, each seed",
        "s in all",
        "mean age",
        "oldest",
        "reward, last 5 steps",
        "area over seconds",
    ]
    rows = []
    for objective, bound in dict.fromkeys((objective, bound) for objective, bound, _ in made):
        runs = _of(made, objective, bound)
        reached = " / ".join("never" if run["reached_s"] is None else f"{run['reached_s']:.1f}" for run in runs)
        means = [float(np.mean([run[name] for run in runs])) for name in ("total_s", "age_mean", "age_max", "last", "area")]
        rows.append([objective, bound, reached, *means])
    notes = [
        f"up to {len(SEEDS)} runs each, from one warm start; means of them",
        "area: mean reward over the seconds of the run, from its first trained step",
    ]
    if num_missing:
        harness.show("staleness-runs, so far", columns=columns, rows=rows, notes=notes)
        _say_left(made, num_left=num_missing)
        print(f"staleness-runs: {len(made)} of {len(made) + num_missing} runs made; call again for the others", flush=True)
        return
    goals = []
    if not arguments.quick:
        write_lines(
            harness.RESULTS / "staleness-seconds.svg",
            {f"corrected, K = {bound}": made["corrected", bound, SEEDS[0]]["curve"] for bound in BOUNDS},
            label="Mean reward over seconds at several staleness bounds",
            x_label="seconds since the first token",
            y_label="mean reward of five steps",
        )
        value = _reached_s(made, 4) / _reached_s(made, 0)
        goals.append(harness.Goal(name="seconds to reward 0.8 at K = 4 over K = 0", value=value, goal=1.0, at_least=False))
    harness.finish("staleness-runs", arguments=arguments, columns=columns, rows=rows, goals=goals, notes=notes)


def _of(made: Made, objective: str, bound: int) -> list[dict[str, Any]]:
    return [run for (its_objective, its_bound, _), run in made.items() if (its_objective, its_bound) == (objective, bound)]


def _reached_s(made: Made, bound: int) -> float:
    """Mean over the seeds, of the demo's own objective."""
    return float(np.mean([float("inf") if run["reached_s"] is None else run["reached_s"] for run in _of(made, "corrected", bound)]))


def _warm(folder: Path, *, quick: bool) -> Path:
    """The config of all runs, whose model has had the demo's warm start; made once."""
    settings = folder / "demo.toml"
    if (folder / "warm").exists():
        return settings
    demo_config(folder=folder, seed=0)
    make_demo_model(folder / "demo-model", seed=0)
    shorter = ["sft.steps=50"] if quick else []
    subprocess.run([sys.executable, "-m", "trainer.sft", str(settings), *shorter], check=True)
    (folder / "warm").touch()
    return settings


def _run(settings: Path, *, folder: Path, objective: str, bound: int, seed: int, steps: int) -> dict[str, Any]:
    """Run once and read from its journals how fast its reward rose."""
    overrides = [
        f"run.folder={json.dumps(str(folder))}",
        f"run.seed={seed}",
        f"pipeline.max_staleness={bound}",
        f"trainer.steps={steps}",
        "evaluation.every=0",
        f"model.path={load(settings).sft_output}",
        f"algorithm.overrides={OBJECTIVES[objective]}",
    ]
    before = set(folder.glob("*"))
    subprocess.run([sys.executable, "-m", "pipelinerl", "run", str(settings), *overrides], check=True)
    (run_folder,) = set(folder.glob("*")) - before
    lines = read_journals(run_folder)
    trained = [line for line in lines if line["kind"] == "step"]
    began = min(line["t"] for line in lines if line["kind"] == "span" and line["lane"].startswith("engine"))
    curve = [
        (line["t"] - began, float(np.mean([other["reward_mean"] for other in trained[max(0, number - 4) : number + 1]])))
        for number, line in enumerate(trained)
    ]
    seconds, rewards = zip(*curve, strict=True)
    return {
        "curve": curve,
        "reached_s": next((at_s for at_s, reward in curve if reward >= REACHED), None),
        "total_s": seconds[-1],
        "steps": len(trained),
        "age_mean": float(np.mean([line["staleness_mean"] for line in trained])),
        "age_max": max(line["staleness_max"] for line in trained),
        "last": rewards[-1],
        "area": float(np.trapezoid(rewards, seconds) / (seconds[-1] - seconds[0])) if len(curve) > 1 else rewards[-1],
    }


def _path(folder: Path, objective: str, bound: int, seed: int) -> Path:
    return folder / f"{objective}-{bound}-{seed}.json"


if __name__ == "__main__":
    main()
