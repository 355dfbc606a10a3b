"""Measures how much staleness a policy learns through: reward per sample against the bound K. Seconds: `staleness_runs.py`.

Several seeds, the age of every token exactly controlled (`scripts/bench/lagged.py`): a figure here depends on no machine's speed. A batch
may get old in a queue (sampled whole K versions ago) or in flight (the policy changes while a sequence is sampled, as streaming does
it), and be trained as if it were fresh (uncorrected), with a clip around the engine's policy (ppo), or with importance weights (decoupled).

Every curve is a file, so a full run may be made in pieces: `--budget-s 150` starts no curve after 150 s, and the next call goes on. A curve
is used again only while the sources it depends on are the same. At K = 0 nothing is old and the three objectives have one gradient:
that curve is made once.

The table AReaL published (arXiv:2505.24298) has a model of 1.5 B, four updates per batch, and its naive objective is ppo here. With one
update per batch ppo is a trust region around the engine's policy, and it is the objective without a correction that plays the naive part.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one process on each core; torch reads it when it is imported

import numpy as np

from scripts.bench import harness
from scripts.bench.figure import write_lines
from scripts.bench.lagged import OBJECTIVES, Curve, Job, Task, learn, make_small_model, warm_start

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


def main() -> None:
    parser = harness.options(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no curve after so many seconds; call again to go on")
    arguments = parser.parse_args()
    quick: bool = arguments.quick
    curves = _curves(quick=quick, num_seeds=1 if quick else arguments.seeds, budget_s=arguments.budget_s)
    if curves is None:
        return
    fresh = _mean(curves[ON_POLICY])
    relative = {key: _mean(found) / fresh for key, found in curves.items()}
    rows: list[list[object]] = [
        [*key, _mean(found), relative[key], _spread(found), _last(found), found[0].age_mean, found[0].ess] for key, found in curves.items()
    ]
    if not quick:
        _draw(curves)
    goals = [
        harness.Goal(
            name="streaming at K = 4 over on-policy, area, worse of the corrected objectives",
            value=min(
                value
                for (objective, where, bound), value in relative.items()
                if objective != "uncorrected" and (where, bound) == ("flight", 4)
            ),
            goal=QUICK_GOAL if quick else 0.97,
        ),
        harness.Goal(name="uncorrected at K = 4 over on-policy, area", value=relative["uncorrected", "queue", 4], goal=0.9, at_least=False),
    ]
    if not quick:
        held = max(relative["decoupled", "queue", 8], relative["ppo", "queue", 8])
        goals.append(harness.Goal(name="best corrected objective at K = 8 over on-policy, area", value=held, goal=0.95))
    columns = ["objective", "old in", "K", "area", "over on-policy", "std over seeds", "last", "mean age", "ess"]
    notes = [
        f"area: mean greedy accuracy on 128 held-out prompts over a run, mean of {len(curves[ON_POLICY])} seeds; last: its last three",
        "on-policy is K = 0, where the three objectives have one gradient; it stands under decoupled",
    ]
    harness.finish("staleness", arguments=arguments, columns=columns, rows=rows, goals=goals, notes=notes)


def _curves(*, quick: bool, num_seeds: int, budget_s: float) -> dict[Key, list[Curve]] | None:
    """Every curve by what it shows, one per seed; None where the budget ended first. A quick run makes all of its own anew."""
    task = Task(steps=40) if quick else Task()
    folder = FOLDER / ("quick" if quick else _sources())
    if quick:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [
        Job(folder=folder / "model", objective=objective, bound=bound, where=where, seed=seed, task=task)
        for seed, (objective, where, bound) in itertools.product(range(num_seeds), _keys(quick=quick))
    ]
    missing = [job for job in jobs if not _path(job).exists()]
    end = time.monotonic() + budget_s
    cores = len(os.sched_getaffinity(0))
    with concurrent.futures.ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(_warm, folder / "model", steps=250 if quick else WARM_START_STEPS).result()
        running: set[concurrent.futures.Future[None]] = set()
        while running or (missing and time.monotonic() < end):
            while missing and len(running) < cores and time.monotonic() < end:
                running.add(pool.submit(_make, missing.pop(0)))
            done, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                future.result()
    if missing:
        print(f"staleness: {len(jobs) - len(missing)} of {len(jobs)} curves made; call again for the others", flush=True)
        return None
    found: dict[Key, list[Curve]] = {}
    for job in jobs:
        curve = Curve(job=job, **json.loads(_path(job).read_text()))
        found.setdefault((job.objective, job.where, job.bound), []).append(curve)
    return {key: found[key] for key in _keys(quick=quick)}


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


def _make(job: Job) -> None:
    curve = learn(job)
    fields = {"samples": curve.samples, "scores": curve.scores, "age_mean": curve.age_mean, "ess": curve.ess}
    unfinished = _path(job).with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(fields))
    unfinished.rename(_path(job))


def _path(job: Job) -> Path:
    return job.folder.with_name(f"{job.objective}-{job.where}-{job.bound}-seed-{job.seed}.json")


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
