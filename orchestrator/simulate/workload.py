"""What the rollouts of a run are like: the draws that its settings and its world say."""

from __future__ import annotations

from orchestrator.simulate.draws import Workload, fixed
from orchestrator.simulate.world import World
from pipelinerl.config import Config


def workload_of(config: Config, world: World, *, seed: int, num_siblings: int) -> Workload:
    """Return the draws of a run's groups, each of `num_siblings`."""
    return Workload(
        seed=seed,
        num_siblings=num_siblings,
        prompt_tokens=world.prompt_tokens,
        lengths=world.lengths,
        likeness=world.likeness,
        length_factors=world.length_factors,
        prompt_factors=world.prompt_factors,
        num_groups=config.trainer.steps * config.batch.groups_per_step,
        turns=world.scoring.turns if config.environment.is_used else fixed(1.0),
        score_s=world.scoring.score_s,
        reply_s=world.scoring.reply_s,
        reward_mean=world.reward_mean,
        truncated_reward_mean=world.truncated_reward_mean,
        reward_spread=world.reward_spread,
    )
