"""ReMax: the baseline of a prompt's rollouts is the reward of its greedy one, which is sampled beside them and never trained.

.venv/bin/python examples/scripts/remax.py
"""

import asyncio
import sys

import numpy as np

from orchestrator.scripted_run import ScriptedRun
from pipelinerl import Controller


async def train(run: ScriptedRun) -> None:
    while run.step < run.num_steps:
        scored = await run.score(run.sample(run.prompts(16)))
        done = await run.train(run.advantages(scored))
        await run.publish()
        greedy, sampled = (
            [one.score.reward or 0.0 for one in scored if one.trajectory.is_greedy is is_greedy] or [0.0] for is_greedy in (True, False)
        )
        print(f"step {done.step}: reward {np.mean(sampled):.3f}, greedy {np.mean(greedy):.3f}", flush=True)


async def main() -> None:
    async with Controller("examples/custom_reward.toml", "run.name=remax", "algorithm.name=remax", *sys.argv[1:]) as run:
        await train(run)


if __name__ == "__main__":
    asyncio.run(main())
