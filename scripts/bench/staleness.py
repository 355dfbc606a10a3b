"""How much staleness a policy learns through, on the demo's task: reward per sample and, on real runs, per second against the bound K.

Per sample: one process, several seeds, the age of every token exactly controlled (`scripts/bench/lagged.py`). A batch may get old in a
queue (sampled whole K versions ago) or in flight (the policy changes while a sequence is sampled, as streaming does it), and be trained
as if it were fresh (uncorrected), with a clip around the engine's policy (ppo), or with importance weights (decoupled).
Per second: whole runs of the demo at several K, left out with --quick. What real ages they have is measured and shown.

The table AReaL published (arXiv:2505.24298) has a model of 1.5 B, four updates per batch, and its naive objective is ppo here. With one
update per batch ppo is a trust region around the engine's policy, and it is the objective without a correction that plays the naive part.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from pipelinerl.metrics import read_journals
from scripts.bench import harness
from scripts.bench.figure import write_lines
from scripts.bench.lagged import OBJECTIVES, Curve, Job, Task, learn, make_small_model, warm_start

FOLDER = Path("runs/bench-staleness")
BOUNDS = (0, 1, 2, 4, 8, 16)
REAL_BOUNDS = (0, 1, 2, 4)
REACHED = 0.8
"""Mean reward of five steps that a real run is timed to."""
Key = tuple[str, str, int]
"""Objective, where tokens get old, K."""


def main() -> None:
    parser = harness.options(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--no-real", action="store_true", help="leave the real runs out")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    curves = _curves(quick=arguments.quick, num_seeds=1 if arguments.quick else arguments.seeds)
    fresh = {objective: _mean(curves["decoupled", "queue", 0]) for objective in OBJECTIVES}
    rows: list[list[object]] = [
        [objective, where, bound, _mean(found), _mean(found) / fresh[objective], _last(found), found[0].age_mean, found[0].ess]
        for (objective, where, bound), found in curves.items()
    ]
    if not arguments.quick:
        _draw(curves)
    real = [] if arguments.quick or arguments.no_real else [_real(bound) for bound in REAL_BOUNDS]
    relative = {key: _mean(found) / fresh[key[0]] for key, found in curves.items()}
    corrected = [relative[objective, "flight", 4] for objective in ("ppo", "decoupled") if (objective, "flight", 4) in relative]
    goals = [
        harness.Goal(name="streaming at K = 4 over on-policy, area, worse of the corrected objectives", value=min(corrected), goal=0.97),
        harness.Goal(name="uncorrected at K = 4 over on-policy, area", value=relative["uncorrected", "queue", 4], goal=0.9, at_least=False),
    ]
    if ("decoupled", "queue", 8) in relative:
        held = max(relative["decoupled", "queue", 8], relative["ppo", "queue", 8])
        goals.append(harness.Goal(name="best corrected objective at K = 8 over on-policy, area", value=held, goal=0.95))
    columns = ["objective", "old in", "K", "area", "over on-policy", "last", "mean age", "ess"]
    spread = [_spread(found) for found in curves.values()]
    notes = [
        "area: mean greedy accuracy on 128 held-out prompts over the run, mean over seeds; on-policy is decoupled at K = 0",
        f"largest standard deviation of an area over seeds: {max(spread):.3f}",
        *real,
    ]
    harness.finish("staleness", arguments=arguments, columns=columns, rows=rows, goals=goals, notes=notes)


def _curves(*, quick: bool, num_seeds: int) -> dict[Key, list[Curve]]:
    """Every curve by what it shows, one per seed. At K = 0 nothing is old, so it does not matter where."""
    model, task = FOLDER / "model", Task(steps=40) if quick else Task()
    bounds = (0, 4) if quick else BOUNDS
    objectives = ("uncorrected", "decoupled") if quick else tuple(OBJECTIVES)
    keys = [key for key in itertools.product(objectives, ("queue", "flight"), bounds) if key[2] or key[1] == "queue"]
    if quick:
        keys.remove(("uncorrected", "flight", 4))
    jobs = [
        Job(folder=model, objective=objective, bound=bound, where=where, seed=seed, task=task)
        for (objective, where, bound), seed in itertools.product(keys, range(num_seeds))
    ]
    cores = len(os.sched_getaffinity(0))
    with concurrent.futures.ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(make_small_model, model).result()
        before = pool.submit(warm_start, model, steps=250 if quick else 600).result()
        print(f"warm start: greedy accuracy {before:.3f}; {len(jobs)} curves", flush=True)
        found: dict[Key, list[Curve]] = {}
        for curve in pool.map(learn, jobs):
            job = curve.job
            found.setdefault((job.objective, job.where, job.bound), []).append(curve)
    return found


def _draw(curves: dict[Key, list[Curve]]) -> None:
    """Two figures for the README: area against K, and the curves at K = 4."""
    shown = [("uncorrected", "queue"), ("ppo", "queue"), ("decoupled", "queue"), ("ppo", "flight"), ("decoupled", "flight")]
    areas = {
        f"{objective}, old in {where}": [
            (float(bound), _mean(curves[objective, "queue" if bound == 0 else where, bound])) for bound in BOUNDS
        ]
        for objective, where in shown
    }
    write_lines(
        harness.RESULTS / "staleness-bound.svg",
        areas,
        label="Area under the learning curve against the staleness bound",
        x_label="staleness bound K",
        y_label="mean held-out accuracy over the run",
    )
    keys: dict[str, Key] = {"on-policy": ("decoupled", "queue", 0)}
    keys |= {f"{objective}, old in {where}": (objective, where, 4) for objective, where in shown}
    write_lines(
        harness.RESULTS / "staleness-curves.svg",
        {name: _mean_curve(curves[key]) for name, key in keys.items()},
        label="Held-out accuracy over samples at staleness bound 4",
        x_label="samples trained, K = 4",
        y_label="held-out accuracy",
    )


def _real(bound: int) -> str:
    """Run the demo at one K and say how fast its reward rose."""
    folder = FOLDER / f"real-{bound}"
    shutil.rmtree(folder, ignore_errors=True)
    overrides = [f"pipeline.max_staleness={bound}", "evaluation.every=0"]
    subprocess.run([sys.executable, "-m", "pipelinerl", "demo", "--folder", str(folder), *overrides], check=True)
    run_folder = max(folder.glob("demo-2*"), key=lambda path: path.stat().st_mtime)
    lines = read_journals(run_folder)
    steps = [line for line in lines if line["kind"] == "step"]
    began = min(line["t"] for line in lines if line["kind"] == "span" and line["lane"].startswith("engine"))
    smooth = [float(np.mean([line["reward_mean"] for line in steps[max(0, n - 4) : n + 1]])) for n in range(len(steps))]
    reached = next((line["t"] - began for line, reward in zip(steps, smooth, strict=True) if reward >= REACHED), None)
    age = float(np.mean([line["staleness_mean"] for line in steps]))
    when = "never" if reached is None else f"{reached:.1f} s"
    total = f"{len(steps)} steps in {steps[-1]['t'] - began:.1f} s"
    return f"real run, K = {bound}: reward {REACHED} after {when}, {total}, mean age {age:.2f}, last reward {smooth[-1]:.3f}"


def _mean(curves: list[Curve]) -> float:
    return float(np.mean([curve.area for curve in curves]))


def _last(curves: list[Curve]) -> float:
    return float(np.mean([curve.last for curve in curves]))


def _spread(curves: list[Curve]) -> float:
    return float(np.std([curve.area for curve in curves]))


def _mean_curve(curves: list[Curve]) -> list[tuple[float, float]]:
    scores = np.mean([curve.scores for curve in curves], axis=0)
    return list(zip(map(float, curves[0].samples), scores.tolist(), strict=True))


if __name__ == "__main__":
    started = time.monotonic()
    main()
    print(f"{time.monotonic() - started:.0f} s")
