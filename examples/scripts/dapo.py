"""DAPO with refill: groups whose rewards are all equal teach nothing, so others are sampled until the step has sixteen that do.

.venv/bin/python examples/scripts/dapo.py
"""

import asyncio
import sys

from orchestrator.scripted_run import ScriptedRun
from pipelinerl import Controller
from pipelinerl.messages import Sample

NUM_GROUPS = 16


async def train(run: ScriptedRun) -> None:
    while run.step < run.num_steps:
        rows: list[Sample] = []
        num_sampled = 0
        while (missing := NUM_GROUPS - len({row.trajectory.group_id for row in rows})) > 0:
            rows += run.advantages(await run.score(run.sample(run.prompts(missing))))  # what the method filters out gives no row
            num_sampled += missing
        done = await run.train(rows)
        await run.publish()
        print(f"step {done.step}: {NUM_GROUPS} of {num_sampled} groups teach, loss {done.metrics['loss']:.4f}", flush=True)


async def main() -> None:
    async with Controller("examples/custom_reward.toml", "run.name=dapo", "algorithm.name=dapo", *sys.argv[1:]) as run:
        await train(run)


if __name__ == "__main__":
    asyncio.run(main())
