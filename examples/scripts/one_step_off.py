"""GRPO one step off: while a step is trained, the rollouts of the next are sampled and scored, and meet its policy in flight.

.venv/bin/python examples/scripts/one_step_off.py
"""

import asyncio
import sys

from orchestrator.scripted_run import ScriptedRun
from pipelinerl import Controller


async def train(run: ScriptedRun) -> None:
    ahead = run.score(run.sample(run.prompts(16)))
    while run.step < run.num_steps:
        rows = run.advantages(await ahead)
        is_last = run.step + 1 == run.num_steps
        ahead = run.score(run.sample([] if is_last else run.prompts(16)))
        done = await run.train(rows)
        await run.publish()
        print(f"step {done.step}: loss {done.metrics['loss']:.4f}", flush=True)


async def main() -> None:
    async with Controller("examples/custom_reward.toml", "run.name=one-step-off", "pipeline.max_staleness=1", *sys.argv[1:]) as run:
        await train(run)


if __name__ == "__main__":
    asyncio.run(main())
