"""PPO with a critic: the loop is GRPO's, and the trainer makes the advantages of the values of a critic that it trains beside.

The critic alone is trained in the first four steps: its values begin as 0.

    .venv/bin/python examples/scripts/ppo.py
"""

import asyncio
import sys

from orchestrator.scripted_run import ScriptedRun
from pipelinerl import Controller


async def train(run: ScriptedRun) -> None:
    while run.step < run.num_steps:
        scored = await run.score(run.sample(run.prompts(16)))
        done = await run.train(run.advantages(scored))
        await run.publish()
        rewards = [one.score.reward or 0.0 for one in scored]
        print(f"step {done.step}: reward {sum(rewards) / len(rewards):.3f}, critic {done.metrics.get('value_loss', 0.0):.4f}", flush=True)


async def main() -> None:
    settings = ("run.name=ppo", "algorithm.name=ppo", "critic.learning_rate=1e-3", "critic.warmup_steps=4")
    async with Controller("examples/custom_reward.toml", *settings, *sys.argv[1:]) as run:
        await train(run)


if __name__ == "__main__":
    asyncio.run(main())
