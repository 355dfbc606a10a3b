"""The success of each prompt, as its source is told it and the ledger keeps it; `data.difficulty` decides by that what is drawn."""

from __future__ import annotations

import dataclasses

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.snapshot import read_resting, read_successes
from orchestrator.rules.batch import sampled_of
from orchestrator.rules.curriculum import epoch_and_number, success_of
from orchestrator.stages.prompts import Source
from pipelinerl.config import Config
from pipelinerl.messages import Group


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptProgress:
    """The source of prompts, the success of each, and where a run that goes on takes it up."""

    source: Source
    config: Config
    ledger: Ledger

    def restore(self, position: tuple[int, int]) -> None:
        """Have the source go on from where the run was interrupted."""
        config, source = self.config, self.source
        source.position = position
        if config.data.difficulty is not None:
            source.resting.update(read_resting(self.ledger))
            correct_reward, group_size = config.algorithm.correct_reward, config.rollout.group_size
            for prompt_id, success in read_successes(self.ledger, correct_reward=correct_reward, group_size=group_size):
                self._measure(prompt_id, success)

    def settled(self, group: Group) -> None:
        """Tell the source how the rollouts of a prompt were scored."""
        rewards = [member.score.reward for member in sampled_of(group.members)]
        success = success_of(rewards, correct_reward=self.config.algorithm.correct_reward)
        self._measure(group.members[0].trajectory.prompt.prompt_id, success)

    def _measure(self, prompt_id: str, success: float | None) -> None:
        number = None
        if success is not None:
            self.source.measured(prompt_id, success=success)
            _, number = epoch_and_number(prompt_id)
        if self.config.data.difficulty is not None:
            self.ledger.store_rest(number, None if number is None else self.source.resting.get(number))
