#!/usr/bin/env python
"""Does it pay to give engines only as many rollouts as their KV caches hold (`pipeline.adaptive_concurrency`)?

On simulated time: the orchestrator as it is, among engines whose caches hold a part of the sequences they have slots for, and push the
youngest out where all grow, as vLLM does; what was pushed out is computed again, at a price per token that differs from machine to machine.
The figures follow from the seed alone, on any machine. How a real vLLM gains is not shown by this.
"""

from __future__ import annotations

import contextlib
import io
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


def main() -> None:
    arguments = harness.options(__doc__ or "").parse_args()
    seeds, steps = range(1 if arguments.quick else 3), 8 if arguments.quick else 20
    rows: list[list[Any]] = []
    for holds, kv_tokens in KV_TOKENS.items():
        for price, prefill_s in PREFILL_S.items():
            worlds = [
                peers.World(seed=seed, kv_tokens=kv_tokens, prefill_s=prefill_s, mean_tokens=MEAN_TOKENS, token_s=1e-5) for seed in seeds
            ]
            fixed, adaptive = ([_run(world, adapts=adapts, steps=steps) for world in worlds] for adapts in (False, True))
            rows.append([holds, price, *(_mean([one[n] for one in side]) for n in range(3) for side in (fixed, adaptive))])
    columns = ["cache holds", "recomputing is", "s", "s adaptive", "pushed out", "adaptive", "stale", "stale adaptive"]
    by_name = {(row[0], row[1]): row for row in rows}
    goals = [
        harness.Goal(name=f"speed, cache holds {holds}, recomputing {price}", value=row[2] / row[3], goal=goal)
        for (holds, price), goal in (
            (("a third", "dear"), 1.0),
            (("a third", "cheap"), 0.95),
            (("most", "dear"), 1.0),
            (("all", "dear"), 0.99),
        )
        if (row := by_name[holds, price])
    ]
    row = by_name["a third", "dear"]
    goals.append(harness.Goal(name="part of what was pushed out that still is", value=row[5] / row[4], goal=0.8, at_least=False))
    harness.finish(
        "concurrency", arguments=arguments, columns=columns, rows=rows, goals=goals, notes=[f"{len(seeds)} seeds, {steps} steps each"]
    )


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


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
