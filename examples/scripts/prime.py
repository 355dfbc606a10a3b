"""PRIME: the trainer learns, beside the policy, which tokens led to a correct answer, and makes dense advantages of that.

Groups that are all wrong or all right are set aside, and others are sampled in their place.

    .venv/bin/python examples/scripts/prime.py
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
        while (missing := NUM_GROUPS - len({row.trajectory.group_id for row in rows})) > 0:
            rows += run.advantages(await run.score(run.sample(run.prompts(missing))))
        done = await run.train(rows)
        await run.publish()
        print(f"step {done.step}: implicit PRM {done.metrics.get('prm_loss', 0.0):.4f}, loss {done.metrics['loss']:.4f}", flush=True)


async def main() -> None:
    settings = ("run.name=prime", "algorithm.name=prime", "algorithm.correct_reward=0.1", "reference.path=runs/example-model")
    async with Controller("examples/custom_reward.toml", *settings, *sys.argv[1:]) as run:
        await train(run)


if __name__ == "__main__":
    asyncio.run(main())
