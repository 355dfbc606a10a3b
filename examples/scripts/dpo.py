"""DPO, online: the best and the worst answer to a prompt are a pair, and -log sigmoid(beta * margin) is its loss (arXiv:2305.18290)."""

import asyncio
import itertools
import sys

import numpy as np

from orchestrator.scripted_run import ScriptedRun
from pipelinerl import Controller
from pipelinerl.messages import Sample, Trajectory

BETA = 0.1
LOSS = "algorithm.overrides={objective='gpg', proximal='current', weight='none', aggregation='seq-mean-token-sum'}"  # -A log pi


async def pairs_of(run: ScriptedRun) -> list[tuple[float, Trajectory]]:
    scored = [one for one in await run.score(run.sample(run.prompts(16))) if one.score.reward is not None]
    ranked = sorted((one.trajectory.group_id, -(one.score.reward or 0.0), one.trajectory.sibling, one.trajectory) for one in scored)
    groups = [list(siblings) for _, siblings in itertools.groupby(ranked, lambda one: one[0])]
    return [(-one[1], one[3]) for group in groups if group[0][1] < group[-1][1] for one in (group[0], group[-1])]


def advantages_of(policy: list[np.ndarray], reference: list[np.ndarray]) -> np.ndarray:
    """Its gradient is that of -A log pi with A = +-beta * sigmoid(-beta * margin)."""
    ratios = np.array([mine.sum() - before.sum() for mine, before in zip(policy, reference, strict=True)])
    weights = 2 * BETA * np.exp(-np.logaddexp(0, BETA * (ratios[::2] - ratios[1::2])))  # 2: a mean over pairs, not over answers
    return np.stack([weights, -weights], axis=1).ravel().astype(np.float32)


async def train(run: ScriptedRun) -> None:
    while run.step < run.num_steps:
        while not (pairs := await pairs_of(run)):
            pass  # no prompt had a better and a worse answer: sample others
        rollouts = [one for _, one in pairs]
        advantages = zip(pairs, advantages_of(await run.logprobs(rollouts, model="policy"), await run.logprobs(rollouts)), strict=True)
        done = await run.train([Sample(trajectory=one, reward=r, advantages=one.loss_mask * a) for (r, one), a in advantages])
        await run.publish()
        print(f"step {done.step}: {len(pairs) // 2} pairs, loss {done.metrics['loss']:.4f}", flush=True)


async def main() -> None:
    async with Controller("examples/custom_reward.toml", "run.name=dpo", LOSS, "reference.path=runs/example-model", *sys.argv[1:]) as run:
        await train(run)


if __name__ == "__main__":
    asyncio.run(main())
