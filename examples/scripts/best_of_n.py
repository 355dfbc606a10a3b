"""Best of n: of each prompt's answers only the best is trained, as if it were a demonstration (rejection sampling fine-tuning, RAFT).

With an advantage of 1 the loss of `reinforce_is` is their negative log-likelihood, weighed by how likely they still are.

    .venv/bin/python examples/scripts/best_of_n.py
"""

import asyncio
import itertools
import sys

import numpy as np

from orchestrator.scripted_run import ScriptedRun
from pipelinerl import Controller
from pipelinerl.messages import Sample, ScoredTrajectory


def reward_of(one: ScoredTrajectory) -> float:
    return -1.0 if one.score.reward is None else one.score.reward


def row_of(one: ScoredTrajectory) -> Sample:
    return Sample(trajectory=one.trajectory, reward=reward_of(one), advantages=one.trajectory.loss_mask.astype(np.float32))


def group_of(one: ScoredTrajectory) -> int:
    return one.trajectory.group_id


async def train(run: ScriptedRun) -> None:
    while run.step < run.num_steps:
        scored = await run.score(run.sample(run.prompts(16)))
        groups = itertools.groupby(sorted(scored, key=group_of), key=group_of)
        best = [max(siblings, key=reward_of) for _, siblings in groups]
        done = await run.train([row_of(one) for one in best])
        await run.publish()
        print(f"step {done.step}: best answers have reward {np.mean([reward_of(one) for one in best]):.3f}", flush=True)


async def main() -> None:
    async with Controller("examples/custom_reward.toml", "run.name=best-of-n", "algorithm.name=reinforce_is", *sys.argv[1:]) as run:
        await train(run)


if __name__ == "__main__":
    asyncio.run(main())
