"""An attempt of a rollout, from its admission to its trajectory: one turn, or an episode of several."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np

from orchestrator.rollouts.multi_turn import Episode
from orchestrator.rollouts.single_turn import trajectory_of
from pipelinerl.messages import Completion, Finish, Generate, Prompt, Sampling, Trajectory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """An attempt of a rollout."""

    rollout_id: str
    group_id: int
    sibling: int
    attempt: int
    prompt: Prompt
    version: int
    """An engine under an older one may not go on with it: of the engine that its group was admitted to, as it might come to exceed the
    staleness bound, or of its last token, as versions never fall along a sequence."""
    admitted_at: float
    is_greedy: bool
    """It is the last of its siblings, in a run whose method asks for one, see `rules.batch.StepRules`."""
    episode: Episode | None = None
    """Its turns so far; None in a run without an environment."""
    is_new: bool = True
    """No engine has answered this attempt yet: where one is asked, the attempt begins."""
    refused_by: tuple[int, ...] = ()
    """Engines whose answers to attempts before could not be true, once for each."""
    reason: str = ""
    """Why the attempt before came to nothing; empty of the first."""

    def next_attempt(self, *, refused_by: int | None = None) -> Rollout:
        """In place of this one, which an engine took with it, or gave an answer to that cannot be true (`refused_by`). What an episode has
        is kept: only the turn that was lost is sampled again."""
        refused = self.refused_by if refused_by is None else (*self.refused_by, refused_by)
        return dataclasses.replace(self, attempt=self.attempt + 1, is_new=True, refused_by=refused)

    def request(self, sampling: Sampling, *, chunk_tokens: int) -> Generate:
        """What to ask an engine for: the completion, or an episode's next turn."""
        episode = self.episode
        return Generate(
            rollout_id=self.rollout_id,
            attempt=self.attempt,
            turn=0 if episode is None else episode.num_turns,
            token_ids=self.prompt.token_ids if episode is None else episode.context,
            sampling=sampling if episode is None else msgspec.structs.replace(sampling, max_tokens=episode.num_left),
            chunk_tokens=chunk_tokens,
        )

    def said(self, completion: Completion) -> Rollout:
        """The same after an engine's answer."""
        if self.episode is None:
            return self
        episode = self.episode.said(completion)
        return dataclasses.replace(self, episode=episode, version=max(self.version, episode.newest_version), is_new=False)

    def trajectory(self, completion: Completion, *, engine_id: int, finished_at: float) -> Trajectory:
        """What came of it; `completion` is the last that it was answered with."""
        facts: dict[str, Any] = {
            "group_id": self.group_id,
            "sibling": self.sibling,
            "is_greedy": self.is_greedy,
            "engine_id": engine_id,
            "admitted_at": self.admitted_at,
            "finished_at": finished_at,
        }
        if self.episode is None:
            return trajectory_of(completion, prompt=self.prompt, **facts)
        return self.episode.trajectory(rollout_id=self.rollout_id, attempt=self.attempt, **facts)


def unanswered(rollout_id: str, *, attempt: int, error: str) -> Completion:
    """What stands for an answer where nobody gives one."""
    nothing = np.zeros(0, np.int32)
    return Completion(
        rollout_id=rollout_id,
        attempt=attempt,
        token_ids=nothing,
        logprobs=np.zeros(0, np.float32),
        versions=nothing,
        finish=Finish.ERROR,
        error=error,
    )
