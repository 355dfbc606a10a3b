"""Plays the rollouts of a run in environments of verifiers 0.4, by its own client: verifiers_agents.py MODEL NUM_AT_ONCE OUTPUT.

A row's columns say which `taskset` it is of, and the number of its `task`. A gateway's two variables are set. What came of each episode is
a line of OUTPUT. It plays until it is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import httpx
from verifiers_client import environment_of, played  # pyright: ignore[reportMissingImports]

TASKSETS, NUM_TASKS = ("verifiers_game", "verifiers_sort"), 2_000


async def play_on(
    http: httpx.AsyncClient, number: int, *, envs: dict[str, Any], tasks: dict[str, list[Any]], model: str, log: TextIO
) -> None:
    """Play one episode after the other."""
    address = os.environ["PIPELINERL_GATEWAY"]
    for count in itertools.count():
        headers = {"authorization": f"Bearer {os.environ['PIPELINERL_GATEWAY_TOKEN']}"}
        answer = await http.post(f"{address}/episodes/next", json={"timeout_s": 30}, headers=headers)
        if answer.status_code == 204:
            continue
        lent = answer.raise_for_status().json()
        columns = lent["prompt"]["columns"]
        variable = f"LEASE_{number}_{count}"  # verifiers keeps a client for each variable that it was told
        os.environ[variable] = lent["token"]
        env, task = envs[columns["taskset"]], tasks[columns["taskset"]][columns["task"]]
        found = await played(env, task, model=model, address=address, variable=variable)
        headers = {"authorization": f"Bearer {lent['token']}"}
        await http.post(f"{lent['episode_url']}/finish", json={"reward": found["reward"]}, headers=headers)
        log.write(json.dumps({"rollout_id": lent["episode_id"], "taskset": columns["taskset"]} | found) + "\n")
        log.flush()


async def main(model: str, num_at_once: int, output: Path) -> None:
    """Play until this process is ended."""
    envs = {name: environment_of(name) for name in TASKSETS}
    tasks = {name: list(itertools.islice(env.taskset, NUM_TASKS)) for name, env in envs.items()}
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=60.0))
        for env in envs.values():
            await stack.enter_async_context(env.serving())
        log = stack.enter_context(output.open("w"))
        async with asyncio.TaskGroup() as group:
            for number in range(num_at_once):
                group.create_task(play_on(http, number, envs=envs, tasks=tasks, model=model, log=log))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
