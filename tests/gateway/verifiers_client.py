"""Plays one episode of an environment of verifiers 0.4 by its own client: verifiers_client.py TASKSET MODEL ADDRESS EPISODE.

The variable LEASE is the episode's token. What came of it is printed as JSON, and the episode is finished with its reward.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import urllib.request
from typing import Any

from verifiers.v1.clients.client import ModelContext  # pyright: ignore[reportMissingImports]
from verifiers.v1.configs.client import TrainClientConfig  # pyright: ignore[reportMissingImports]
from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]


def environment_of(taskset: str) -> Any:
    """Load the environment of a taskset."""
    config_type = loaders.environment_class(taskset).__orig_bases__[0].__args__[0]
    seat = {"harness": {"id": "verifiers_game"}, "runtime": {"type": "subprocess"}}
    seats = {name: seat for name in ("player", "agent") if name in config_type.model_fields}
    return loaders.load_environment(config_type.model_validate({"taskset": {"id": taskset}, **seats}))


async def played(env: Any, task: Any, *, model: str, address: str, variable: str) -> dict[str, Any]:
    """Play a task in an environment that is being served; the environment variable `variable` holds the episode's token."""
    client = TrainClientConfig(base_url=f"{address}/v1", api_key_var=variable, renderer_model_name=model)
    (slot,) = env.slots(task)
    episode = await env.run_slot(slot, ModelContext(client=client, model="policy"))
    (trace,) = episode.traces
    assert not trace.errors, trace.errors
    said = [node for node in trace.nodes if node.sampled]
    return {"reward": trace.reward, "num_turns": len(said), "sampled": sum(sum(node.mask) for node in said)}


async def _first(taskset: str, model: str, address: str) -> dict[str, Any]:
    env = environment_of(taskset)
    (task,) = itertools.islice(env.taskset, 1)
    async with env.serving():
        return await played(env, task, model=model, address=address, variable="LEASE")


def main(taskset: str, model: str, address: str, episode_url: str) -> None:
    """Play, and finish."""
    found = asyncio.run(_first(taskset, model, address))
    headers = {"authorization": f"Bearer {os.environ['LEASE']}", "content-type": "application/json"}
    finish = urllib.request.Request(f"{episode_url}/finish", json.dumps({"reward": found["reward"]}).encode(), headers)
    urllib.request.urlopen(finish, timeout=30).read()
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
