"""A run that is resumed takes from its ledger the position of its prompts, the scored trajectories for each stage, and the settings for a
checker.
"""

from __future__ import annotations

from typing import Any

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.snapshot import Snapshot, read_resting, read_successes
from orchestrator.rules.batch import sampled_of
from orchestrator.rules.curriculum import epoch_and_number, success_of
from orchestrator.stages.prompts import Source
from pipelinerl.config import Config
from pipelinerl.messages import Group, ScoredTrajectory


class PromptProgress:
    """The success of each prompt, as it is told to the source of prompts; `data.difficulty` decides by that what is drawn."""

    def __init__(self, source: Source, *, config: Config, ledger: Ledger) -> None:
        self._source = source
        self._config = config
        self._ledger = ledger

    def restore(self, position: tuple[int, int]) -> None:
        """Have the source go on from where the run was interrupted."""
        config, source = self._config, self._source
        source.position = position
        if config.data.difficulty is not None:
            source.resting.update(read_resting(self._ledger))
            correct_reward, group_size = config.algorithm.correct_reward, config.rollout.group_size
            for prompt_id, success in read_successes(self._ledger, correct_reward=correct_reward, group_size=group_size):
                self._measure(prompt_id, success)

    def settled(self, group: Group) -> None:
        """Tell the source how the rollouts of a prompt were scored."""
        rewards = [member.score.reward for member in sampled_of(group.members)]
        success = success_of(rewards, correct_reward=self._config.algorithm.correct_reward)
        self._measure(group.members[0].trajectory.prompt.prompt_id, success)

    def _measure(self, prompt_id: str, success: float | None) -> None:
        source, number = self._source, None
        if success is not None:
            source.measured(prompt_id, success=success)
            _, number = epoch_and_number(prompt_id)
        if self._config.data.difficulty is not None:
            self._ledger.store_rest(number, None if number is None else source.resting.get(number))


def scored_for(stage: str, *, past: Snapshot, config: Config) -> tuple[ScoredTrajectory, ...]:
    """Return the trajectories that were scored and not assigned before the run was interrupted, for the stage that is next to see them."""

    def next_stage(name: str) -> str:
        if config.compares_siblings and name in past.group_scored:
            return "batching"
        if config.prm.is_used and name not in past.prm_scored:
            return "prm"
        return "group_rewards" if config.compares_siblings else "batching"

    return tuple(one for one in past.scored if next_stage(one.trajectory.rollout_id) == stage)


def settings_for_checker(config: Config, *, has_greedy_baseline: bool, max_staleness: int) -> dict[str, Any]:
    """Return the settings that an independent checker of the ledger needs."""
    return {
        "group_size": config.rollout.group_size,
        "has_greedy_baseline": has_greedy_baseline,
        "groups_per_step": config.batch.groups_per_step,
        "max_row_tokens": config.batch.max_tokens,
        "max_turns": config.environment.max_turns if config.environment.function is not None else None,
        "max_staleness": max_staleness,
        "num_steps": config.trainer.steps,
        "has_prm": config.prm.is_used,
        "has_group_rewards": config.compares_siblings,
        "early_stop_threshold": config.prm.early_stop.threshold,
        "seed": config.run.seed,
    }
