"""The simulator's own speed: a thousand engines and a million rollouts on one core."""

from __future__ import annotations

import time

from orchestrator.simulate.draws import Distribution
from orchestrator.simulate.run import Simulated, simulate
from orchestrator.simulate.world import EngineWorld, ScoringWorld, SyncWorld, TrainerWorld, World
from scripts.bench.foreseen.published import config

FLEET = World(
    engine=EngineWorld(pass_s=((1, 0.006), (64, 0.012), (128, 0.018)), kv_token_s=2e-8, prefill_token_s=3e-6, kv_tokens=600_000),
    sync=SyncWorld(publish_beside_s=0.5, num_bytes=15e9, sender_rate=4e12, receiver_rate=40e9, pause_s=0.02),
    trainer=TrainerWorld(row_s=0.02, token_s=1.1e-7, step_s=0.4),
    scoring=ScoringWorld(score_s=Distribution(kind="lognormal", mean=0.4, cv=1.0), failed_fraction=0.001),
    prompt_tokens=Distribution(kind="uniform", low=100, high=500),
    lengths=Distribution(kind="lognormal", mean=1500.0, cv=0.9),
    likeness=0.3,
)
"""Engines about as fast as an H100 is with a model of 7 B parameters, and a trainer about as fast as a thousand of them."""


def fleet(*, engines: int, rollouts: int) -> tuple[Simulated, float]:
    """Simulate steps of 128 groups of 16 for every 16 engines; return the run, and its seconds of one core."""
    groups = max(8, engines // 8 * 4)
    steps = max(2, round(rollouts / (groups * 16)))
    settings = config(engines=engines, slots=64, groups=groups, group_size=16, steps=steps, staleness=8, queue_bytes=1 << 36)
    began_s = time.process_time()
    ended = simulate(settings, FLEET)
    return ended, time.process_time() - began_s
