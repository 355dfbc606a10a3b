#!/usr/bin/env python
"""Does it pay to give engines only as many rollouts as their KV caches hold (`pipeline.adaptive_concurrency`)?

On simulated time: the orchestrator as it is, among engines whose caches hold a part of the sequences they have slots for, and push the
youngest out where all grow, as vLLM does; what was pushed out is computed again, at a price per token that differs from machine to machine.
The figures follow from the seed alone, on any machine. How a real vLLM gains is not shown by this.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import harness
from tests.sim import peers
from tests.sim.run import config, run

MEAN_TOKENS = 120
KV_TOKENS = {"a third": 3000, "most": 6000, "all": 12000}
"""Of one engine with 64 slots: what part of the sequences it holds."""
PREFILL_S = {"cheap": 2e-5, "dear": 2e-4}
"""A token computed again, beside forward passes of 10 ms."""


class Counted(peers.SimulatedEngine):
    """Adds up what all engines of a run push out."""

    engines: list[Counted] = []  # noqa: RUF012 emptied before each run

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.engines.append(self)


GOALS = {("a third", "dear"): 1.0, ("a third", "cheap"): 0.95, ("most", "dear"): 1.0, ("all", "dear"): 0.99}
"""Speed of adaptive over fixed, by what the cache holds and the price of recomputing."""


def measure(arguments: Any) -> harness.Measured:
    seeds, steps = range(1 if arguments.quick else 3), 8 if arguments.quick else 20
    rows: dict[tuple[str, str], harness.Row] = {}
    for holds, price in itertools.product(KV_TOKENS, PREFILL_S):
        world = functools.partial(
            peers.World, kv_tokens=KV_TOKENS[holds], prefill_s=PREFILL_S[price], mean_tokens=MEAN_TOKENS, token_s=1e-5
        )
        row: harness.Row = {"cache holds": holds, "recomputing is": price}
        fixed, adaptive = ([_run(world(seed=seed), adapts=adapts, steps=steps) for seed in seeds] for adapts in (False, True))
        for number, columns in enumerate((("s", "s adaptive"), ("pushed out", "adaptive"), ("stale", "stale adaptive"))):
            row |= {name: statistics.fmean(one[number] for one in side) for name, side in zip(columns, (fixed, adaptive), strict=True)}
        rows[holds, price] = row
    goals = [
        harness.at_least(f"speed, cache holds {holds}, recomputing {price}", row["s"] / row["s adaptive"], goal)
        for (holds, price), goal in GOALS.items()
        if (row := rows[holds, price])
    ]
    row = rows["a third", "dear"]
    goals.append(harness.at_most("part of what was pushed out that still is", row["adaptive"] / row["pushed out"], 0.8))
    return harness.Measured(rows=list(rows.values()), goals=goals, notes=[f"{len(seeds)} seeds, {steps} steps each"])


def _run(world: peers.World, *, adapts: bool, steps: int) -> tuple[float, int, int]:
    """Seconds, sequences pushed out, stale rollouts of one run."""
    Counted.engines.clear()
    settings = config(
        rollout={"group_size": 8, "max_tokens": 1000},
        engine={"count": 2, "max_running": 64},
        batch={"groups_per_step": 16, "max_tokens": 2048},
        pipeline={"adaptive_concurrency": adapts},
        trainer={"steps": steps},
    )
    peers.SimulatedEngine, kept = Counted, peers.SimulatedEngine
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            found = run(settings, folder=Path(folder), world=world)
    finally:
        peers.SimulatedEngine = kept
    assert found.problems() == [], found.problems()
    return found.seconds, sum(engine.num_pushed_out for engine in Counted.engines), found.ending.rollouts.stale


if __name__ == "__main__":
    harness.run("concurrency", measure, works=())
