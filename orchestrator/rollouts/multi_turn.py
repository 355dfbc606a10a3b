"""An episode: the model and an environment take turns in one linear sequence of tokens, which decides the next request.

Tokens are never made twice: the model's are the engine's ids, the environment's are the ids its text was tokenised to once, and each turn
is asked for with all of them before it. So versions and log-probabilities stay those under which each token was sampled, and a trajectory
of several turns is one row.

An environment with state is reset before the first turn: what it says then stands behind the prompt. It hears every whole turn, the last
too, since it rewards each. Where its process is lost the episode begins again from the prompt, in a new attempt (`restarted`).

An episode ends when the environment says so, after `max_turns`, or when `max_tokens` after the prompt leave no room for the environment's
reply and one more token: then it is truncated, and scored as it is. It ends with the model's tokens, since nothing after them would be
trained on. This is a rule, without clock and socket; each step gives a new value.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

from pipelinerl.messages import UNSAMPLED, Completion, Finish, Float32, Int32, Outcome, Prompt, Result, Trajectory, Turns

FIRST_STATE = "prompt"
"""The state that the first turn of every sibling answers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The turns of a rollout so far."""

    prompt: Prompt
    max_tokens: int
    """Tokens after the prompt, the environment's included."""
    max_turns: int
    is_stateful: bool = False
    """True for an environment with state."""
    token_ids: Int32 = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    """[T] int32, after the prompt."""
    logprobs: Float32 = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))
    """[T] float32, natural log, 0.0 for the environment's tokens."""
    versions: Int32 = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    """[T] int32, `UNSAMPLED` for the environment's tokens."""
    starts: tuple[int, ...] = ()
    """[K] first token of each turn."""
    ends: tuple[int, ...] = ()
    """[K] last token of each turn."""
    states: tuple[str, ...] = (FIRST_STATE,)
    """The state that each turn answered; one more than turns while the next is awaited."""
    rewards: tuple[float, ...] = ()
    """The environment's own reward of each turn that it heard; empty without state."""
    num_restarts: int = 0
    """Times that it began again, because the process that held its environment was lost."""
    has_drifted: bool = False
    """True where it ended because the chat template cannot say what follows a sampled turn."""
    recomputed: tuple[int, ...] = ()
    """The same column as in `Trajectory`."""
    finish: Finish = Finish.STOP
    """The finish of the last turn; `LENGTH` where there is no room for another."""
    outcome: Outcome = Outcome.OK
    """The outcome of the environment."""
    error: str = ""
    is_over: bool = False
    """True where no turn follows."""

    @property
    def num_turns(self) -> int:
        return len(self.ends)

    @property
    def num_left(self) -> int:
        """The most tokens that the next turn may have."""
        return self.max_tokens - len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of its token columns, and of the prompt's."""
        return 4 * len(self.prompt.token_ids) + 12 * len(self.token_ids)

    @property
    def context(self) -> Int32:
        """[P + T] int32, the tokens that the next turn continues."""
        return np.concatenate((self.prompt.token_ids, self.token_ids))

    @property
    def newest_version(self) -> int:
        """The version of the last sampled token; `UNSAMPLED` before there is one. No engine that holds an older version may go on."""
        return int(self.versions[self.ends[-1]]) if self.ends else UNSAMPLED

    @property
    def turns(self) -> Turns | None:
        """The turns so far; None before the first."""
        if not self.ends:
            return None
        heard = np.array((*self.rewards, 0.0)[: self.num_turns], np.float32)  # a turn that was cut off was not heard
        return Turns(
            starts=np.array(self.starts, np.int32),
            ends=np.array(self.ends, np.int32),
            states=self.states[: self.num_turns],
            rewards=heard if self.is_stateful and len(heard) == self.num_turns else None,
        )

    def restarted(self) -> Episode:
        """Return the episode before its first turn, to be played once more."""
        return Episode(
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            max_turns=self.max_turns,
            is_stateful=self.is_stateful,
            num_restarts=self.num_restarts + 1,
        )

    def said(self, completion: Completion) -> Episode:
        """Return the episode after the model's turn. It is over unless the environment is to reply, which it does only to whole turns."""
        start, num_sampled = len(self.token_ids), len(completion.token_ids)
        num_turns = self.num_turns + (num_sampled > 0)
        return dataclasses.replace(
            self,
            token_ids=np.concatenate((self.token_ids, completion.token_ids)),
            logprobs=np.concatenate((self.logprobs, completion.logprobs)),
            versions=np.concatenate((self.versions, completion.versions)),
            starts=(*self.starts, start) if num_sampled else self.starts,
            ends=(*self.ends, start + num_sampled - 1) if num_sampled else self.ends,
            recomputed=(*self.recomputed, *(start + at for at in completion.recomputed)),
            finish=completion.finish,
            error=completion.error,
            is_over=completion.finish is not Finish.STOP or not num_sampled or (num_turns >= self.max_turns and not self.is_stateful),
        )

    def observe(self, result: Result) -> Episode:
        """Return the episode after the environment's reply to the last turn; to an episode before its first, after its reset."""
        if result.outcome is not Outcome.OK:
            error = f"environment: {result.error}"
            return dataclasses.replace(self, finish=Finish.ERROR, outcome=result.outcome, error=error, is_over=True)
        observation, is_reset = result.observation, not self.num_turns
        rewards = self.rewards if is_reset else (*self.rewards, result.reward)
        if observation is None or self.num_turns >= self.max_turns:
            is_over = not is_reset or observation is not None
            return dataclasses.replace(self, is_over=is_over, rewards=rewards, has_drifted=result.has_drifted)
        num_observed = len(observation.token_ids)
        if num_observed >= self.num_left:
            if is_reset:
                error = f"environment: its reset says {num_observed} tokens, and rollout.max_tokens is {self.max_tokens}"
                return dataclasses.replace(self, finish=Finish.ERROR, outcome=Outcome.INVALID, error=error, is_over=True)
            return dataclasses.replace(self, finish=Finish.LENGTH, is_over=True, rewards=rewards)
        return dataclasses.replace(
            self,
            token_ids=np.concatenate((self.token_ids, observation.token_ids)),
            logprobs=np.concatenate((self.logprobs, np.zeros(num_observed, np.float32))),
            versions=np.concatenate((self.versions, np.full(num_observed, UNSAMPLED, np.int32))),
            states=(observation.state,) if is_reset else (*self.states, observation.state),
            rewards=rewards,
        )

    def trajectory(self, **facts: Any) -> Trajectory:
        """Return the trajectory of the episode; `facts` are those fields of a trajectory that no turn changes."""
        return end_to_end(
            self.prompt,
            self,
            finish=self.finish,
            error=self.error,
            turns=self.turns,
            outcome=self.outcome,
            recomputed=self.recomputed,
            **facts,
        )


class Sampled(Protocol):
    """What follows a prompt: a completion, or an episode. Legend: `T` tokens."""

    @property
    def token_ids(self) -> Int32: ...

    @property
    def logprobs(self) -> Float32: ...

    @property
    def versions(self) -> Int32: ...


def end_to_end(prompt: Prompt, sampled: Sampled, **facts: Any) -> Trajectory:
    """Lay a prompt and what follows it end to end, in the engine's own token ids; `facts` are the other fields of a trajectory."""
    num_prompt = len(prompt.token_ids)
    versions = np.concatenate((np.full(num_prompt, UNSAMPLED, np.int32), sampled.versions))
    return Trajectory(
        prompt=prompt,
        token_ids=np.concatenate((prompt.token_ids, sampled.token_ids)),
        loss_mask=versions != UNSAMPLED,
        logprobs=np.concatenate((np.zeros(num_prompt, np.float32), sampled.logprobs)),
        versions=versions,
        **facts,
    )
