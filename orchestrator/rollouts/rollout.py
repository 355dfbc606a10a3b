"""An attempt of a rollout, from its admission to its trajectory: one turn, or an episode of several."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np

from orchestrator.rollouts.multi_turn import Episode, end_to_end
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
    """An engine under an older version may not go on with it. It is the version of the engine that its group was admitted to, since it
    might otherwise exceed the staleness bound, or of its last token, since versions never fall along a sequence.
    """
    admitted_at: float
    is_greedy: bool
    """True for the last of its siblings, in a run whose method asks for a greedy one, see `rules.batch.StepRules`."""
    episode: Episode | None = None
    """Its turns so far; None in a run without an environment."""
    is_new: bool = True
    """True while no engine has answered this attempt: sending it to an engine then begins the attempt."""
    refused_by: tuple[int, ...] = ()
    """Engines that gave impossible answers to earlier attempts, once for each answer."""
    reason: str = ""
    """The reason why the attempt before failed; empty for the first."""

    def next_attempt(self, *, refused_by: int | None = None) -> Rollout:
        """Return the attempt after this one, which was lost with its engine, or got an impossible answer (from `refused_by`).

        An episode keeps its turns: only the turn that was lost is sampled again.
        """
        refused = self.refused_by if refused_by is None else (*self.refused_by, refused_by)
        return dataclasses.replace(self, attempt=self.attempt + 1, is_new=True, refused_by=refused)

    def request(self, sampling: Sampling, *, chunk_tokens: int) -> Generate:
        """Return the request for an engine: for the completion, or for an episode's next turn."""
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
        """Return the rollout after an engine's answer."""
        if self.episode is None:
            return self
        episode = self.episode.said(completion)
        return dataclasses.replace(self, episode=episode, version=max(self.version, episode.newest_version), is_new=False)

    def trajectory(self, completion: Completion, *, engine_id: int, finished_at: float) -> Trajectory:
        """Return the trajectory; `completion` is the last answer to this attempt."""
        facts: dict[str, Any] = {
            "rollout_id": self.rollout_id,
            "attempt": self.attempt,
            "group_id": self.group_id,
            "sibling": self.sibling,
            "is_greedy": self.is_greedy,
            "engine_id": engine_id,
            "admitted_at": self.admitted_at,
            "finished_at": finished_at,
        }
        if self.episode is not None:
            return self.episode.trajectory(**facts)
        facts |= {name: getattr(completion, name) for name in ("finish", "error", "routes", "recomputed")}
        return end_to_end(self.prompt, completion, **facts)


def unanswered(rollout_id: str, *, attempt: int, error: str) -> Completion:
    """Return the completion that stands for a missing answer."""
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
