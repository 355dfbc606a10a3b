"""Each rule of dispatch, alone and with the others, on the same rollouts, in simulated time."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from orchestrator.simulate.draws import Distribution
from orchestrator.simulate.run import Simulated, simulate
from orchestrator.simulate.summary import summary_of
from orchestrator.simulate.world import EngineWorld, ScoringWorld, SyncWorld, TrainerWorld, World
from pipelinerl.config import Config
from pipelinerl.config.file import parse
from scripts.bench import harness

LONG_TAIL = World(
    engine=EngineWorld(pass_s=((1, 0.006), (16, 0.008), (64, 0.012)), kv_token_s=2e-8, prefill_token_s=3e-5),
    sync=SyncWorld(publish_beside_s=0.5, num_bytes=15e9, sender_rate=200e9, receiver_rate=50e9, pause_s=0.02),
    trainer=TrainerWorld(row_s=0.02, token_s=4e-6, step_s=0.4),
    scoring=ScoringWorld(score_s=Distribution(kind="lognormal", mean=0.1, cv=1.0)),
    prompt_tokens=Distribution(kind="uniform", low=200, high=800),
    lengths=Distribution(kind="lognormal", mean=1200.0, cv=1.2),
    likeness=0.6,
)
"""Engines about as fast as an H100 is with a model of 7 B parameters, four of them; a trainer that keeps up."""
LITTLE_ROOM = dataclasses.replace(LONG_TAIL, engine=dataclasses.replace(LONG_TAIL.engine, kv_tokens=16_000))
"""KV caches that hold about 15 of the 32 sequences for which an engine has slots."""
ALIKE = dataclasses.replace(LONG_TAIL, likeness=0.9)

OFF: dict[str, Any] = {}
RULES: dict[str, dict[str, Any]] = {
    "none": OFF,
    "longest first": {"dispatch": "longest_first"},
    "least loaded": {"routing": "least_loaded"},
    "KV admission": {"kv_admission": True},
    "adaptive concurrency": {"adaptive_concurrency": True},
    "all three": {"dispatch": "longest_first", "routing": "least_loaded", "kv_admission": True},
}
CASES: dict[str, tuple[World, dict[str, Any]]] = {
    "sync": (LONG_TAIL, {"mode": "sync"}),
    "sync, siblings alike": (ALIKE, {"mode": "sync"}),
    "streaming, K = 1": (LONG_TAIL, {"max_staleness": 1}),
    "streaming, K = 4": (LONG_TAIL, {"max_staleness": 4}),
    "sync, little KV": (LITTLE_ROOM, {"mode": "sync"}),
    "streaming, K = 4, little KV": (LITTLE_ROOM, {"max_staleness": 4}),
}

QUICK = ("sync", "sync, siblings alike", "sync, little KV")


def config(*, steps: int, **pipeline: Any) -> Config:
    """Four engines with 32 slots, and steps of 64 groups of 8."""
    tree = {
        "model": {"path": "unused"},
        "data": {"source": "unused"},
        "reward": [{"function": "unused:reward"}],
        "rollout": {"group_size": 8, "max_tokens": 8192},
        "engine": {"kind": "fake", "count": 4, "max_running": 32},
        "batch": {"groups_per_step": 64, "max_tokens": 16384},
        "pipeline": pipeline,
        "trainer": {"steps": steps},
        "scorer": {"slots": 64},
        "checkpoint": {"every": 1 << 20},
    }
    return parse(tree, origin="ablation")


def measure(*, quick: bool) -> harness.Measured:
    """Return the table: every rule in every case, mean over seeds."""
    found = harness.Measured()
    seeds, steps = range(1 if quick else 3), 5 if quick else 8
    gains: dict[tuple[str, str], float] = {}
    for case in QUICK if quick else CASES:
        world, pipeline = CASES[case]
        usual: list[float] = []
        for rule, keys in RULES.items():
            runs = [simulate(config(steps=steps, **pipeline, **keys), world, seed=seed) for seed in seeds]
            speeds = [run.totals.num_trained_tokens / run.totals.step_ends_s[-1] for run in runs]
            usual = usual or speeds
            gains[case, rule] = statistics.fmean(after / before for before, after in zip(usual, speeds, strict=True))
            found.rows.append(_row(case, rule, runs, speeds, gains[case, rule]))
    found.notes.append(f"{len(seeds)} seeds, {steps} steps each; the same rollouts in every row of a case")
    for name, case, rule, goal in GOALS:
        found.goals.append(harness.at_least(name, gains[case, rule], goal))
    found.notes.append(
        "in the cases without little KV no cache is ever full, so KV admission is there what sending one by one is worth alone"
    )
    beyond = gains["sync, siblings alike", "longest first"] / gains["sync, siblings alike", "KV admission"]
    found.goals.append(harness.at_least("longest first, sync, siblings alike: tokens/s over one by one in order", beyond, 1.0))
    lengths = {row["rule"]: row["tokens of a sample"] for row in found.rows if row["case"] == "sync"}
    drift = abs(lengths["longest first"] / lengths["none"] - 1)
    found.goals.append(harness.at_most("longest first, sync: trained lengths differ by", drift, 1e-9))
    return found


GOALS = (
    ("longest first, sync: tokens/s over none", "sync", "longest first", 1.05),
    ("longest first, sync, siblings alike: tokens/s over none", "sync, siblings alike", "longest first", 1.1),
    ("least loaded, sync: tokens/s over none", "sync", "least loaded", 1.03),
    ("KV admission, sync, little KV: tokens/s over none", "sync, little KV", "KV admission", 1.03),
)


def _row(case: str, rule: str, runs: list[Simulated], speeds: list[float], gain: float) -> harness.Row:
    figures = [summary_of(run) for run in runs]
    samples = sum(sum(run.totals.step_samples) for run in runs)
    return {
        "case": case,
        "rule": rule,
        "tokens/s": statistics.fmean(speeds),
        "over none": gain,
        "engines idle": statistics.fmean(one.engines_idle_fraction for one in figures),
        "staleness": statistics.fmean(one.staleness_mean for one in figures),
        "stale": sum(run.rollouts.stale for run in runs),
        "evicted": sum(run.num_evicted for run in runs),
        "tokens of a sample": sum(run.totals.num_trained_tokens for run in runs) / samples,
    }
