"""GRPO as a script: sample, score, train, publish, one after the other.

    .venv/bin/python examples/make_model.py
    .venv/bin/python examples/scripts/grpo.py

Settings are those of `examples/custom_reward.toml`; any of them can follow on the command line, as for `pipelinerl run`.
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
        print(f"step {done.step}: reward {sum(rewards) / len(rewards):.3f}, loss {done.metrics['loss']:.4f}", flush=True)


async def main() -> None:
    async with Controller("examples/custom_reward.toml", "run.name=grpo", *sys.argv[1:]) as run:
        await train(run)


if __name__ == "__main__":
    asyncio.run(main())
