"""Small worlds and configs in which every time can be worked out on paper."""

from __future__ import annotations

from typing import Any

from orchestrator.simulate.draws import Distribution, fixed
from orchestrator.simulate.world import EngineWorld, ScoringWorld, SyncWorld, TrainerWorld, World
from pipelinerl.config import Config
from pipelinerl.config.file import parse


def config(**sections: Any) -> Config:
    """Two engines and groups of two; each keyword overrides keys of one section."""
    tree: dict[str, Any] = {
        "model": {"path": "unused"},
        "data": {"source": "unused"},
        "reward": [{"function": "unused:reward"}],
        "rollout": {"group_size": 2, "max_tokens": 64},
        "engine": {"kind": "fake", "count": 2, "max_running": 4},
        "batch": {"groups_per_step": 1, "max_tokens": 256},
        "pipeline": {"max_staleness": 1},
        "trainer": {"steps": 3},
        "checkpoint": {"every": 1000},
    }
    for name, values in sections.items():
        tree[name] = values if isinstance(values, list) else {**tree.get(name, {}), **values}
    return parse(tree, origin="simulation")


ON_PAPER = World(
    engine=EngineWorld(pass_s=((1, 1.0),)),
    sync=SyncWorld(stage_s=fixed(0.5), pause_s=0.25),
    trainer=TrainerWorld(row_s=1.0, token_s=0.0, step_s=1.0),
    scoring=ScoringWorld(score_s=fixed(0.0)),
    prompt_tokens=fixed(1.0),
    lengths=fixed(4.0),
)
"""A pass lasts a second, a row one, a step's end one; policies take half a second, and a swap a quarter."""

BUSY = World(
    engine=EngineWorld(pass_s=((1, 0.010), (16, 0.016)), kv_token_s=1e-6, prefill_token_s=2e-5, kv_tokens=1200),
    sync=SyncWorld(publish_beside_s=0.02, num_bytes=1e8, sender_rate=2e9, receiver_rate=1e9, stage_s=fixed(0.01), pause_s=0.002),
    trainer=TrainerWorld(row_s=0.01, token_s=2e-5, step_s=0.05, checkpoint_s=0.1, restart_s=3.0),
    scoring=ScoringWorld(score_s=Distribution(kind="exponential", mean=0.02), failed_fraction=0.02, reply_tokens=7, turns=fixed(3.0)),
    prompt_tokens=Distribution(kind="uniform", low=20, high=60),
    lengths=Distribution(kind="lognormal", mean=60.0, cv=0.8),
    likeness=0.4,
    report_every_s=0.2,
)
"""Where everything happens: long tails, full KV caches, failed scores."""
