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


class RequestKind(enum.StrEnum):
    """What a scorer is asked for."""

    REWARD = "reward"
    """The reward of one completion."""
    GROUP_REWARD = "group reward"
    """The rewards that compare siblings."""
    ENVIRONMENT = "environment"
    """What the environment replies to the last turn of an episode."""


class ScorerTask(Message, frozen=True):
    """Completions of one prompt, and what to do with them."""

    kind: RequestKind
    rollout_id: Id
    """Rollout that it is about; of siblings, the first."""
    attempt: int
    prompt: Prompt
    completions: Annotated[tuple[Int32, ...], msgspec.Meta(min_length=1, max_length=1 << 16)]
    """Each [T] int32, the tokens after the prompt, which the scorer decodes; one, or of siblings at least two, in order."""
    finishes: tuple[Finish, ...]
    """One for each completion; of an episode, that of its last turn."""
    turns: tuple[Turns | None, ...]
    """One for each completion; None in a run without an environment: all of it is one turn."""

    def __post_init__(self) -> None:
        check_lengths(self, "completions", "finishes", "turns")


class Request(Message, frozen=True):
    """Ask a scorer. Its number is never used again: one that is asked for anew gets another, so a late answer is told from the awaited."""

    request_id: int
    task: ScorerTask


class CancelRequest(Message, frozen=True):
    """Nobody waits for a request any more: no answer is to follow."""

    request_id: int


class Observation(Message, frozen=True):
    """What an environment said."""

    token_ids: Int32
    """int32, at least one: its text, tokenised here and never again."""
    state: Id
    """Name of the state that the next turn answers."""

    def __post_init__(self) -> None:
        if not len(self.token_ids):
            raise ValueError("Observation: no token; expected some, or no `Observation` at all where the episode is over")


class Result(Message, frozen=True):
    """A scorer's answer to a `Request`."""

    request_id: int
    outcome: Outcome
    """One for all completions: functions that compare siblings fail together, and a rollout whose environment fails, fails."""
    rewards: Annotated[tuple[float, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """Weighted sum of the components of each completion; empty unless `outcome` is `OK`, and of an environment."""
    components: Annotated[tuple[Figures, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """Of each completion, the reward of each function that applied, by its name, before weighting."""
    observation: Observation | None = None
    """None where the environment says that the episode is over, or failed; and of rewards."""
    error: Text = ""
    """What went wrong, with the function's name; empty where `outcome` is `OK`."""
    duration_s: float = 0.0

    def __post_init__(self) -> None:
        check_lengths(self, "rewards", "components")
        has_values = bool(self.rewards) or self.observation is not None
        if (has_values and self.outcome is not Outcome.OK) or not all(map(math.isfinite, self.rewards)):
            got = f"outcome {self.outcome} with rewards {self.rewards}{' and an observation' if self.observation is not None else ''}"
            raise ValueError(f"Result {self.request_id}: {got}; only ok has any, and rewards are finite")


FromScorer = ScorerReady | ScorerLoad | FunctionFailed | Result | PrmReady | PrmLoad | StepsScored | Failed
ToScorer = Request | CancelRequest | TraceTokens | Cancel | Stop
