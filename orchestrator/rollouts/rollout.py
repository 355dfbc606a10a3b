"""An attempt of a rollout, from its admission to its trajectory: one turn, or an episode of several."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import xxhash

from orchestrator.rollouts.multi_turn import Episode
from orchestrator.rollouts.trajectories import end_to_end
from pipelinerl.messages import Completion, Finish, Generate, Prompt, Result, Sampling, Trajectory

LOST_ENVIRONMENT = "environment: the process that held it is gone"
"""The reason why an attempt was lost whose episode begins again."""
MAX_RESTARTS = 3
"""Times that an episode begins again, before it fails. 0 would fail it for its neighbours' memory; a larger value lets an environment that
crashes each time be played as often."""


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
    written: Completion | None = None
    """What engines have sampled that it has left since: the next one goes on after it. None: it begins at its prompt."""

    def next_attempt(self, *, refused_by: int | None = None) -> Rollout:
        """Return the attempt after this one, which was lost with its engine, or got an impossible answer (from `refused_by`).

        An episode keeps its turns: only the turn that was lost is sampled again.
        """
        refused = self.refused_by if refused_by is None else (*self.refused_by, refused_by)
        return dataclasses.replace(self, attempt=self.attempt + 1, is_new=True, refused_by=refused)

    def moved(self, completion: Completion) -> Rollout:
        """Return the attempt after this one, which goes on in another engine after the tokens that this one's has sampled."""
        written = self.joined(completion)
        if not len(written.token_ids) or completion.routes is not None:  # the next engine would route its tokens anew
            return self.next_attempt()
        return dataclasses.replace(self.next_attempt(), written=written, version=max(self.version, int(written.versions[-1])))

    def joined(self, completion: Completion) -> Completion:
        """Return an engine's answer after what earlier engines have sampled, each token with its own version and log-probability. The KV
        cache was computed anew where it moved.
        """
        before = self.written
        if before is None:
            return completion
        num = len(before.token_ids)
        columns = {
            name: np.concatenate((getattr(before, name), getattr(completion, name))) for name in ("token_ids", "logprobs", "versions")
        }
        recomputed = (*before.recomputed, num, *(num + place for place in completion.recomputed))
        return msgspec.structs.replace(completion, **columns, recomputed=recomputed, num_written=0, started_at=before.started_at)

    @property
    def is_stateful(self) -> bool:
        """True where its environment has state, and must stand before its first turn."""
        return self.episode is not None and self.episode.is_stateful

    @property
    def is_over(self) -> bool:
        """True where no turn follows what it has."""
        return self.episode is None or self.episode.is_over

    @property
    def may_restart(self) -> bool:
        return self.episode is not None and self.episode.num_restarts < MAX_RESTARTS

    def restarted(self) -> Rollout:
        """Return the rollout before its first turn: the process that held its environment was lost."""
        assert self.episode is not None
        return dataclasses.replace(self, episode=self.episode.restarted(), is_new=True)

    def observe(self, result: Result) -> Rollout:
        """Return the rollout after its environment's reply."""
        return self if self.episode is None else dataclasses.replace(self, episode=self.episode.observe(result))

    def request(self, sampling: Sampling, *, chunk_tokens: int) -> Generate:
        """Return the request for an engine: for the completion, or for an episode's next turn.

        A seed of `sampling` is the run's; from it each request gets one of its own.
        """
        episode = self.episode
        turn = 0 if episode is None else episode.num_turns
        sampling = sampling.of_turn(turn)
        if sampling.seed is not None:
            name = f"{sampling.seed}/{self.rollout_id}/{self.attempt}/{turn}".encode()
            sampling = msgspec.structs.replace(sampling, seed=xxhash.xxh3_64_intdigest(name) >> 1)
        token_ids, num_left = (self.prompt.token_ids, sampling.max_tokens) if episode is None else (episode.context, episode.num_left)
        written = np.zeros(0, np.int32) if self.written is None else self.written.token_ids
        return Generate(
            rollout_id=self.rollout_id,
            attempt=self.attempt,
            turn=turn,
            token_ids=np.concatenate((token_ids, written)) if len(written) else token_ids,
            sampling=msgspec.structs.replace(sampling, max_tokens=num_left - len(written)),
            chunk_tokens=chunk_tokens,
            images=self.prompt.images,
            num_written=len(written),
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
