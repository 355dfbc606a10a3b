"""Sequences that move between engines by re-prefill: relief of full caches, and engines emptied at the end of a round."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from orchestrator.simulate.run import Simulated, simulate
from orchestrator.simulate.summary import summary_of
from scripts.bench import harness
from scripts.bench.scheduled.rules import LITTLE_ROOM, LONG_TAIL, RULES, config

UNEVEN = dataclasses.replace(LITTLE_ROOM, likeness=0.95)
"""Siblings of nearly equal length, which go to one engine together: some engines' caches are full while others have room."""
CASES = {
    "sync, little KV": (LITTLE_ROOM, {"mode": "sync"}),
    "sync, little KV, siblings alike": (UNEVEN, {"mode": "sync"}),
    "streaming, K = 1, little KV": (LITTLE_ROOM, {"max_staleness": 1}),
    "sync": (LONG_TAIL, {"mode": "sync"}),
}
QUICK = ("sync, little KV", "sync")
WAYS: dict[str, tuple[int | None, dict[str, Any]]] = {
    "none": (None, {}),
    "relieve": (0, {}),
    "relieve and repack": (16, {}),
    "dispatch": (None, RULES["all three"]),
    "dispatch, relieve": (0, RULES["all three"]),
}
"""Engines into which others are emptied get 16 sequences at most, half of their slots."""


def measure(*, quick: bool) -> harness.Measured:
    """Return the table."""
    found = harness.Measured()
    seeds, steps = range(1 if quick else 3), 5 if quick else 8
    gains: dict[tuple[str, str], float] = {}
    for case in QUICK if quick else CASES:
        world, pipeline = CASES[case]
        usual: list[float] = []
        for way, (migration, keys) in WAYS.items():
            settings = config(steps=steps, **pipeline, **keys)
            runs = [simulate(settings, world, seed=seed, migration=migration) for seed in seeds]
            speeds = [run.totals.num_trained_tokens / run.totals.step_ends_s[-1] for run in runs]
            usual = usual or speeds
            gains[case, way] = statistics.fmean(after / before for before, after in zip(usual, speeds, strict=True))
            found.rows.append(_row(case, way, runs, speeds, gains[case, way]))
    found.notes.append(f"{len(seeds)} seeds, {steps} steps each; a sequence moves by re-prefill, with ids, log-probabilities and versions")
    found.goals.append(harness.at_least("relieve, sync, little KV: tokens/s over none", gains["sync, little KV", "relieve"], 1.2))
    return found


def _row(case: str, way: str, runs: list[Simulated], speeds: list[float], gain: float) -> harness.Row:
    figures = [summary_of(run) for run in runs]
    return {
        "case": case,
        "migration": way,
        "tokens/s": statistics.fmean(speeds),
        "over none": gain,
        "engines idle": statistics.fmean(one.engines_idle_fraction for one in figures),
        "moved": sum(run.num_moved for run in runs),
        "evicted": sum(run.num_evicted for run in runs),
        "stale": sum(run.rollouts.stale for run in runs),
    }
