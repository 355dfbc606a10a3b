"""Sequences that move between engines by re-prefill: relief of full caches, and engines emptied at the end of a round."""

from __future__ import annotations

import dataclasses
import statistics

from orchestrator.simulate.run import Simulated, simulate
from orchestrator.simulate.summary import summary_of
from scripts.bench import harness
from scripts.bench.scheduled.rules import LITTLE_ROOM, LONG_TAIL, config

UNEVEN = dataclasses.replace(LITTLE_ROOM, likeness=0.95)
"""Siblings of nearly equal length, which go to one engine together: some engines' caches are full while others have room."""
CASES = {
    "sync, little KV": (LITTLE_ROOM, {"mode": "sync"}),
    "sync, little KV, siblings alike": (UNEVEN, {"mode": "sync"}),
    "streaming, K = 1, little KV": (LITTLE_ROOM, {"max_staleness": 1}),
    "sync": (LONG_TAIL, {"mode": "sync"}),
}
WAYS: dict[str, int | None] = {"none": None, "relieve": 0, "relieve and repack": 16}


def measure(*, quick: bool) -> harness.Measured:
    """Return the table."""
    found = harness.Measured()
    seeds, steps = range(1 if quick else 3), 5 if quick else 8
    gains: dict[tuple[str, str], float] = {}
    for case, (world, pipeline) in CASES.items():
        usual: list[float] = []
        for way, migration in WAYS.items():
            runs = [simulate(config(steps=steps, **pipeline), world, seed=seed, migration=migration) for seed in seeds]
            times = [run.totals.step_ends_s[-1] for run in runs]
            usual = usual or times
            gains[case, way] = statistics.fmean(before / after for before, after in zip(usual, times, strict=True))
            found.rows.append(_row(case, way, runs, times, gains[case, way]))
    found.notes.append(f"{len(seeds)} seeds, {steps} steps each; a sequence moves by re-prefill, with ids, log-probabilities and versions")
    found.goals.append(harness.at_least("relieve, sync, little KV: speed over none", gains["sync, little KV", "relieve"], 1.0))
    return found


def _row(case: str, way: str, runs: list[Simulated], times: list[float], gain: float) -> harness.Row:
    figures = [summary_of(run) for run in runs]
    return {
        "case": case,
        "migration": way,
        "s": statistics.fmean(times),
        "speed": gain,
        "engines idle": statistics.fmean(one.engines_idle_fraction for one in figures),
        "moved": sum(run.num_moved for run in runs),
        "evicted": sum(run.num_evicted for run in runs),
        "stale": sum(run.rollouts.stale for run in runs),
    }
