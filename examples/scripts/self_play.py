"""Self-play of two policies: both answer the same prompts, and who writes more of the asked letter wins. Each is trained on its own games.

    .venv/bin/python examples/scripts/self_play.py

`policies.bob.trainer.learning_rate=3e-4` sets one of bob's alone."""

import asyncio
import sys

import numpy as np

from orchestrator.policies import PoliciesRun
from orchestrator.scripted_run import ScriptedRun
from pipelinerl import Policies
from pipelinerl.messages import Prompt, Sample, Trajectory


async def play(player: ScriptedRun, prompts: list[Prompt]) -> tuple[list[Trajectory], np.ndarray]:
    """The player's answers, group by group, and the share of the letter in each: [prompts, siblings]."""
    games = sorted(await player.sample(prompts), key=lambda one: (one.group_id, one.sibling))
    texts = [player.text(one) for one in games]
    shares = [text.count(one.prompt.text[:1]) / max(1, len(text)) for one, text in zip(games, texts, strict=True)]
    return games, np.array(shares).reshape(len(prompts), -1)


def rows_of(games: list[Trajectory], won: np.ndarray) -> list[Sample]:
    gains = zip(games, won.ravel(), (won - won.mean(axis=1, keepdims=True)).ravel(), strict=True)
    rows = [Sample(trajectory=one, reward=float(win), advantages=np.float32(gain) * one.loss_mask) for one, win, gain in gains]
    return [row for row in rows if row.trajectory.num_trained_tokens]


async def train(run: PoliciesRun) -> None:
    alice, bob = run.policies["alice"], run.policies["bob"]
    while alice.step < alice.num_steps and bob.step < bob.num_steps:
        prompts = alice.prompts(16)
        (hers, a), (his, b) = await asyncio.gather(play(alice, prompts), play(bob, prompts))
        wins = (1 + np.sign(a - b)) / 2
        await asyncio.gather(alice.train(rows_of(hers, wins)), bob.train(rows_of(his, 1 - wins)))
        await asyncio.gather(alice.publish(), bob.publish())
        print(f"step {alice.step}: alice {a.mean():.2f}, bob {b.mean():.2f} of the letter; alice wins {wins.mean():.2f}", flush=True)


async def main() -> None:
    async with Policies("examples/custom_reward.toml", "run.name=self-play", "policies={alice={}, bob={}}", *sys.argv[1:]) as run:
        await train(run)


if __name__ == "__main__":
    asyncio.run(main())
