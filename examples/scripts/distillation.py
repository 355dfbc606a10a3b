"""On-policy distillation: the policy answers, and learns from how likely each of its tokens is to a teacher. No reward is asked for.

    .venv/bin/python examples/scripts/distillation.py reference.path=MY_TEACHER

Without a teacher of yours it is the model that the run begins with, from which there is nothing to learn.
"""

import asyncio
import sys

import numpy as np

from orchestrator.scripted_run import ScriptedRun
from pipelinerl import Controller
from pipelinerl.messages import Sample


async def train(run: ScriptedRun) -> None:
    while run.step < run.num_steps:
        rollouts = await run.sample(run.prompts(16))
        teacher = await run.logprobs(rollouts, model="reference")
        gaps = [(one.logprobs - column)[one.loss_mask].mean() for one, column in zip(rollouts, teacher, strict=True)]
        await run.train([Sample(trajectory=one, reward=0.0, advantages=np.zeros(one.num_tokens, np.float32)) for one in rollouts])
        await run.publish()
        print(f"step {run.step - 1}: the teacher is {np.mean(gaps):.4f} nats/token away", flush=True)


async def main() -> None:
    settings = ("run.name=distillation", "algorithm.name=opd", "reference.path=runs/example-model")
    async with Controller("examples/custom_reward.toml", *settings, *sys.argv[1:]) as run:
        await train(run)


if __name__ == "__main__":
    asyncio.run(main())
