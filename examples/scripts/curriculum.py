"""A curriculum with SFT between RL: prompts grow longer, and where the policy does not yet earn enough, demonstrations come first.

.venv/bin/python examples/scripts/curriculum.py
"""

import asyncio
import sys

import numpy as np

from orchestrator.scripted_run import ScriptedRun
from pipelinerl import Controller

ENOUGH = 0.3
ROWS = [[{"prompt": f"{letter * length}=", "letter": letter, "completion": letter * 4} for letter in "abc"] for length in (1, 4, 8)]


async def train(run: ScriptedRun) -> None:
    level = 0
    while run.step < run.num_steps:
        scored = await run.score(run.sample(ROWS[level]))
        reward = np.mean([one.score.reward for one in scored if one.score.reward is not None])
        if reward < ENOUGH:
            done = await run.sft(ROWS[level])
        else:
            done = await run.train(run.advantages(scored))
            level = min(level + 1, len(ROWS) - 1)
        await run.publish()
        print(f"step {done.step}: level {level}, reward {reward:.3f}, loss {done.metrics['loss']:.4f}", flush=True)


async def main() -> None:
    async with Controller("examples/custom_reward.toml", "run.name=curriculum", *sys.argv[1:]) as run:
        await train(run)


if __name__ == "__main__":
    asyncio.run(main())
