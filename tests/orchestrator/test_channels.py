"""Channels between stages are bounded in bytes, and a mixture's routes are most of these."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np

from orchestrator.channels import make_channels
from orchestrator.rollouts.rows import Row
from pipelinerl.data.expert_routes import routes_of
from pipelinerl.messages import ScoredTrajectory, Trajectory
from pipelinerl.runtime.stage import Channel
from pipelinerl.runtime.watch import Watch
from tests.orchestrator import handmade
from tests.sim.clock import simulate

NUM_LAYERS, TOP_K = 48, 8


def routed() -> Trajectory:
    trajectory = handmade.trajectory([0] * 6, num_prompt=2)
    table = np.zeros((trajectory.num_tokens - 1, NUM_LAYERS, TOP_K), np.uint8)
    return msgspec.structs.replace(trajectory, routes=routes_of(table))


async def num_taken(channel: Channel[Any], item: Any) -> int:
    """Puts that end before one has to wait."""
    for count in range(10):
        put = asyncio.create_task(channel.put(item))
        await asyncio.sleep(0.01)
        if not put.done():
            put.cancel()
            return count
    return 10


def test_whoever_gives_trajectories_with_routes_waits_at_the_bound():
    trajectory = routed()
    num_bytes = 13 * trajectory.num_tokens + (trajectory.num_tokens - 1) * NUM_LAYERS * TOP_K

    async def program() -> None:
        channels = make_channels(
            watch=Watch(stall_limit_s=600.0), queue_bytes=3 * num_bytes, num_policies=1, has_prm=True, compares_siblings=True
        )
        scored = ScoredTrajectory(trajectory=trajectory, score=handmade.scored(trajectory).score)
        for channel in (channels.generated, channels.trajectories):
            assert await num_taken(channel, trajectory) == 3
        for channel in (channels.scored, channels.prm_scored, channels.group_scored):
            assert await num_taken(channel, scored) == 3

    simulate(program())


def test_rows_with_routes_wait_at_the_bound():
    sample = handmade.sample(6)
    sample = msgspec.structs.replace(sample, trajectory=routed(), advantages=np.zeros(routed().num_tokens, np.float32))
    row = Row(step=0, samples=(sample,))
    assert row.num_bytes > sample.num_tokens * NUM_LAYERS

    async def program() -> None:
        channels = make_channels(watch=Watch(stall_limit_s=600.0), queue_bytes=3 * row.num_bytes, num_policies=1)
        assert await num_taken(channels.rows, row) == 3

    simulate(program())
