"""Measures how much staleness a policy learns through: reward per sample against the bound K. Seconds: `staleness_runs.py`.

Several seeds, the age of every token exactly controlled (`scripts/bench/lagged.py`): a figure here depends on no machine's speed. A batch
may get old in a queue (sampled whole K versions ago) or in flight (the policy changes while a sequence is sampled, as streaming does
it), and be trained as if it were fresh (uncorrected), with a clip around the engine's policy (ppo), or with importance weights (decoupled).

Every curve is a file, so a full run may be made in pieces (`--budget-s`). A curve is used again only while the sources it depends on are
the same. At K = 0 nothing is old and the three objectives have one gradient: that curve is made once.

The table AReaL published (arXiv:2505.24298) has a model of 1.5 B, four updates per batch, and its naive objective is ppo here. With one
update per batch ppo is a trust region around the engine's policy, and it is the objective without a correction that plays the naive part.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import itertools
import multiprocessing
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one process on each core; torch reads it when it is imported

import numpy as np

from scripts.bench import harness
from scripts.bench.figure import write_lines
from scripts.bench.lagged import OBJECTIVES, Curve, Job, Task, learn, make_small_model, warm_start
from scripts.bench.pieces import BUDGET, Pieces

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("runs/bench-staleness")
BOUNDS = (0, 1, 2, 4, 8, 16)
PLACES = ("queue", "flight")
WARM_START_STEPS = 600
QUICK_GOAL = 0.8
"""Of one seed and half the steps: the steps before the policy has caught up with its own lag weigh twice."""
Key = tuple[str, str, int]
"""Objective, where tokens get old, K."""
ON_POLICY: Key = ("decoupled", "queue", 0)


def measure(arguments: Any) -> harness.Measured | None:
    quick: bool = arguments.quick
    curves = _curves(quick=quick, num_seeds=1 if quick else arguments.seeds, budget_s=arguments.budget_s)
    if curves is None:
        return None
    fresh = _mean(curves[ON_POLICY])
    relative = {key: _mean(found) / fresh for key, found in curves.items()}
    if not quick:
        _draw(curves)
    streaming = min(relative[objective, "flight", 4] for objective in ("ppo", "decoupled"))
    goals = [
        harness.at_least(
            "streaming at K = 4 over on-policy, area, worse of the corrected objectives", streaming, QUICK_GOAL if quick else 0.97
        ),
        harness.at_most("uncorrected at K = 4 over on-policy, area", relative["uncorrected", "queue", 4], 0.9),
    ]
    if not quick:
        held = max(relative["decoupled", "queue", 8], relative["ppo", "queue", 8])
        goals.append(harness.at_least("best corrected objective at K = 8 over on-policy, area", held, 0.95))
    return harness.Measured(
        rows=[
            {
                "objective": key[0],
                "old in": key[1],
                "K": key[2],
                "area": _mean(found),
                "over on-policy": relative[key],
                "std over seeds": float(np.std([curve.area for curve in found])),
                "last": float(np.mean([curve.last for curve in found])),
                "mean age": found[0].age_mean,
                "ess": found[0].ess,
            }
            for key, found in curves.items()
        ],
        goals=goals,
        notes=[
            f"area: mean greedy accuracy on 128 held-out prompts over a run, mean of {len(curves[ON_POLICY])} seeds; last: its last three",
            "on-policy is K = 0, where the three objectives have one gradient; it stands under decoupled",
        ],
    )


def _curves(*, quick: bool, num_seeds: int, budget_s: float) -> dict[Key, list[Curve]] | None:
    """Every curve by what it shows, one per seed; None where the budget ended first. A quick run makes all of its own anew."""
    task = Task(steps=40) if quick else Task()
    folder = FOLDER / ("quick" if quick else _sources())
    if quick:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    keys = _keys(quick=quick)
    pieces = Pieces(folder, [(*key, seed) for seed, key in itertools.product(range(num_seeds), keys)], budget_s=budget_s)
    missing = pieces.missing
    cores = len(os.sched_getaffinity(0))
    with concurrent.futures.ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(_warm, folder / "model", steps=250 if quick else WARM_START_STEPS).result()
        running: dict[concurrent.futures.Future[Curve], tuple[str, str, int, int]] = {}
        while running or (missing and pieces.may_start):
            while missing and len(running) < cores and pieces.may_start:
                objective, where, bound, seed = key = missing.pop(0)
                job = Job(folder=folder / "model", objective=objective, bound=bound, where=where, seed=seed, task=task)
                running[pool.submit(learn, job)] = key
            for future in concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED).done:
                pieces.keep(running.pop(future), dataclasses.asdict(future.result()))
    made = pieces.made
    if missing:
        print(f"staleness: {len(made)} of {len(pieces.wanted)} curves made; call again for the others", flush=True)
        return None
    return {key: [Curve(**made[*key, seed]) for seed in range(num_seeds)] for key in keys}


def _keys(*, quick: bool) -> list[Key]:
    if quick:
        return [ON_POLICY, ("uncorrected", "queue", 4), ("decoupled", "flight", 4), ("ppo", "flight", 4)]
    return [ON_POLICY, *((objective, where, bound) for objective in OBJECTIVES for where in PLACES for bound in BOUNDS if bound)]


def _sources() -> str:
    """A digest of everything a curve depends on."""
    files = [Path(__file__).with_name("lagged.py")]
    files += sorted(path for part in ("pipelinerl/algorithms", "pipelinerl/demo", "trainer") for path in (ROOT / part).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def _warm(folder: Path, *, steps: int) -> None:
    """The warm-started model that every curve begins with; made once."""
    if folder.exists():
        return
    unfinished = folder.with_name("unfinished-model")
    make_small_model(unfinished)
    print(f"warm start: greedy accuracy {warm_start(unfinished, steps=steps):.3f}", flush=True)
    unfinished.rename(folder)


def _draw(curves: dict[Key, list[Curve]]) -> None:
    """Two figures for the README: area against K, and the curves at K = 4."""
    shown = [("uncorrected", "queue"), ("ppo", "queue"), ("decoupled", "queue"), ("ppo", "flight"), ("decoupled", "flight")]
    areas: dict[str, Sequence[tuple[float, float]]] = {
        f"{objective}, old in {where}": [
            (float(bound), _mean(curves[(objective, where, bound) if bound else ON_POLICY])) for bound in BOUNDS
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
    keys: dict[str, Key] = {"on-policy": ON_POLICY}
    keys |= {f"{objective}, old in {where}": (objective, where, 4) for objective, where in shown}
    write_lines(
        harness.RESULTS / "staleness-curves.svg",
        {name: _mean_curve(curves[key]) for name, key in keys.items()},
        label="Held-out accuracy over samples at staleness bound 4",
        x_label="samples trained, K = 4",
        y_label="held-out accuracy",
    )


def _mean(curves: list[Curve]) -> float:
    return float(np.mean([curve.area for curve in curves]))


def _mean_curve(curves: list[Curve]) -> list[tuple[float, float]]:
    scores = np.mean([curve.scores for curve in curves], axis=0)
    return list(zip(map(float, curves[0].samples), scores.tolist(), strict=True))


if __name__ == "__main__":
    harness.run("staleness", measure, works=(), options={"--seeds": {"type": int, "default": 5}, **BUDGET})
