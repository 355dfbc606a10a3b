"""What the orchestrator and scorers say to each other: rewards, environments, and failures of the user's functions."""

from __future__ import annotations

import enum
import math
from typing import Annotated

import msgspec
import numpy as np

from pipelinerl.messages.base import Failed, Figures, Id, Int32, Mask, Message, Outcome, Prompt, Stop, Text, check_lengths
from pipelinerl.messages.engine import Cancel, Finish
from pipelinerl.messages.prm import PrmLoad, PrmReady, StepsScored, TraceTokens


class ScorerReady(Message, frozen=True):
    """A scorer has loaded its reward functions."""

    scorer_id: int
    process_id: int
    num_slots: int
    """Calls it runs at once."""


class FunctionLoad(Message, frozen=True):
    """How one reward function does, since its scorer started; durations over its last calls."""

    num_calls: int
    """Tries, retried ones included."""
    num_failed: Annotated[dict[Id, int], msgspec.Meta(max_length=16)]
    """Tries that ended as timeout, error or invalid, by outcome."""
    num_retries: int
    """Tries that followed a failed one."""
    p50_s: float
    p95_s: float
    max_s: float
    slowest: Id
    """Rollout of the longest of them."""
    breaker: Id
    """closed, open or half-open."""


class FunctionKind(enum.StrEnum):
    """What a user's function is for."""

    REWARD = "reward"
    ENVIRONMENT = "environment"
    PRM = "prm"
    """A process reward model, or the judge in its place."""
    SOURCE = "source"
    """It yields prompts."""
    LOSS = "loss"
    """A loss, an advantage, a mask or a weight."""


class FunctionFailed(Message, frozen=True):
    """Calls of a function failed by one cause: told at once for the first, then of the further ones together. See `function_errors`."""

    function: Id
    kind: FunctionKind
    outcome: Outcome
    cause: Annotated[str, msgspec.Meta(max_length=1000)]
    """On one line: exception type and message, or what was returned, or how the process ended."""
    where: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """`file:line`; empty where nobody knows."""
    traceback: Annotated[str, msgspec.Meta(max_length=16384)] = ""
    """Of the first failure; empty in what is told of further ones."""
    rollout_id: Id = ""
    """Of the first failure."""
    num_new: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Failures by this cause since the last time it was told."""
    num_calls: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Calls of the function so far, all of them."""


class ScorerLoad(Message, frozen=True):
    """A scorer's gauges, sent every second; also its sign of life."""

    scorer_id: int
    num_running: int
    num_scored: int
    busy_s: float
    """Seconds of reward calls since it started, summed over slots."""
    functions: Annotated[dict[Id, FunctionLoad], msgspec.Meta(max_length=4096)] = msgspec.field(default_factory=dict)
    """By the function's name; without those that were not called yet."""


class Turns(Message, frozen=True):
    """Where the turns of an episode lie among the tokens after the prompt. Between two of them lies what the environment said."""

    starts: Int32
    """[K] int32, position of each turn's first token, the first 0."""
    ends: Int32
    """[K] int32, position of its last token."""
    states: Annotated[tuple[Id, ...], msgspec.Meta(max_length=1 << 16)]
    """[K] name of the state that each turn answers: equal for equal states of sibling rollouts."""

    def __post_init__(self) -> None:
        check_lengths(self, "starts", "ends", "states")
        borders = np.stack((self.starts, self.ends), 1).ravel()
        if not len(borders) or borders[0] != 0 or (self.ends < self.starts).any() or (self.starts[1:] <= self.ends[:-1] + 1).any():
            raise ValueError(
                f"Turns: from {self.starts.tolist()} to {self.ends.tolist()}, expected at least one, the first from 0, each with a token"
                " and at least one of the environment before the next"
            )

    def mask(self, num_tokens: int) -> Mask:
        """[num_tokens] true where the policy sampled the token."""
        sampled = np.zeros(num_tokens, np.bool_)
        for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True):
            sampled[start : end + 1] = True
        return sampled


class Reply(Message, frozen=True):
    """Ask a scorer what the environment replies to the last turn of an episode."""

    episode_id: Id
    """Name of the rollout."""
    attempt: int
    prompt: Prompt
    token_ids: Int32
    """[T] int32, the tokens after the prompt; the scorer decodes them."""
    turns: Turns
    finish: Finish
    """Of the last turn."""

    @property
    def turn(self) -> int:
        """Number of the last turn, from 0."""
        return len(self.turns.starts) - 1

    @property
    def rollout_id(self) -> str:
        """Under which the request is known: a late answer to an earlier turn is none to this one. No rollout has such a name."""
        return f"{self.episode_id}/turn/{self.turn}"


class Observation(Message, frozen=True):
    """What an environment said."""

    token_ids: Int32
    """int32, at least one: its text, tokenised here and never again."""
    state: Id
    """Name of the state that the next turn answers."""

    def __post_init__(self) -> None:
        if not len(self.token_ids):
            raise ValueError("Observation: no token; expected some, or no `Observation` at all where the episode is over")


class Replied(Message, frozen=True):
    """A scorer's answer to `Reply`."""

    episode_id: Id
    attempt: int
    turn: int
    """The one replied to, from 0."""
    outcome: Outcome
    """A rollout whose environment is not `OK` fails as that."""
    observation: Observation | None = None
    """None where the environment says that the episode is over, or failed."""
    error: Text = ""
    """What went wrong, with the function's name; empty where `outcome` is `OK`."""
    duration_s: float = 0.0

    def __post_init__(self) -> None:
        if self.observation is not None and self.outcome is not Outcome.OK:
            raise ValueError(f"Replied {self.rollout_id}: outcome {self.outcome} with an observation; only ok has that")

    @property
    def rollout_id(self) -> str:
        """As of `Reply`."""
        return f"{self.episode_id}/turn/{self.turn}"


class Score(Message, frozen=True):
    """Ask a scorer for the reward of one trajectory."""

    rollout_id: Id
    attempt: int
    prompt: Prompt
    token_ids: Int32
    """[T] int32, the tokens after the prompt; the scorer decodes them."""
    finish: Finish
    turns: Turns | None = None
    """None in a run without an environment: all of it is one turn."""


class ScoreGroup(Message, frozen=True):
    """Ask a scorer for the rewards that compare siblings; sent once every sibling has an outcome of its own."""

    group_id: int
    members: Annotated[tuple[Score, ...], msgspec.Meta(max_length=1 << 16)]
    """Siblings that are scored, in order; at least two, of one prompt."""

    @property
    def rollout_id(self) -> str:
        """Under which the request is known; no rollout has such a name."""
        return f"group/{self.group_id}"

    @property
    def attempt(self) -> int:
        return 0


class Scored(Message, frozen=True):
    """A scorer's answer."""

    rollout_id: Id
    attempt: int
    outcome: Outcome
    reward: float | None
    """Weighted sum of the components; None unless `outcome` is `OK`."""
    components: Figures = msgspec.field(default_factory=dict)
    """Reward of each function that applied, by its name, before weighting."""
    error: Text = ""
    """What went wrong, with the function's name; empty where `outcome` is `OK`."""
    duration_s: float = 0.0

    def __post_init__(self) -> None:
        has_reward = self.reward is not None and math.isfinite(self.reward)
        if has_reward != (self.outcome is Outcome.OK) or (self.reward is not None and not has_reward):
            raise ValueError(
                f"Scored {self.rollout_id}: outcome {self.outcome} with reward {self.reward}; only ok has one, and it is finite"
            )


class GroupScored(Message, frozen=True):
    """A scorer's answer to `ScoreGroup`."""

    group_id: int
    outcome: Outcome
    """One for the whole group: functions that compare siblings fail together."""
    rewards: Annotated[tuple[float, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """Weighted sum of the components of each member; empty unless `outcome` is `OK`."""
    components: Annotated[tuple[Figures, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """As `Scored.components`, for each member."""
    error: Text = ""
    duration_s: float = 0.0

    def __post_init__(self) -> None:
        check_lengths(self, "rewards", "components")
        if bool(self.rewards) != (self.outcome is Outcome.OK) or not all(map(math.isfinite, self.rewards)):
            raise ValueError(f"GroupScored {self.group_id}: outcome {self.outcome} with rewards {self.rewards}; only ok has them, finite")

    @property
    def rollout_id(self) -> str:
        return f"group/{self.group_id}"

    @property
    def attempt(self) -> int:
        return 0


FromScorer = ScorerReady | ScorerLoad | FunctionFailed | Replied | Scored | GroupScored | PrmReady | PrmLoad | StepsScored | Failed
ToScorer = Reply | Score | ScoreGroup | TraceTokens | Cancel | Stop
