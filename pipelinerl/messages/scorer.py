"""Messages between the orchestrator and scorers: rewards, environments, and failures of the user's functions."""

from __future__ import annotations

import enum
import math
from typing import Annotated

import msgspec
import numpy as np

from pipelinerl.messages.base import Failed, Figures, Float32, Id, Int32, Mask, Message, Outcome, Prompt, Stop, Text, check_lengths
from pipelinerl.messages.engine import Cancel, Finish
from pipelinerl.messages.prm import PrmLoad, PrmReady, StepsScored, TraceTokens


class ScorerReady(Message, frozen=True):
    """A scorer has loaded its reward functions."""

    scorer_id: int
    process_id: int
    num_slots: int
    """Number of calls that the scorer runs at once."""


class FunctionLoad(Message, frozen=True):
    """The statistics of one reward function since its scorer started; durations are taken over its last calls."""

    num_calls: int
    """Number of tries, including retries."""
    num_failed: Annotated[dict[Id, int], msgspec.Meta(max_length=16)]
    """Number of tries that ended as timeout, error or invalid, by outcome."""
    num_retries: int
    """Number of tries that followed a failed one."""
    p50_s: float
    p95_s: float
    max_s: float
    slowest: Id
    """Rollout of the longest of these calls."""
    breaker: Id
    """State of the circuit breaker: closed, open or half-open."""


class FunctionKind(enum.StrEnum):
    """The purpose of a user's function."""

    REWARD = "reward"
    ENVIRONMENT = "environment"
    PRM = "prm"
    """A process reward model, or the judge in its place."""


class FunctionFailed(Message, frozen=True):
    """Calls of a function failed for one cause. The first failure is reported at once, further ones together; see `function_errors`."""

    function: Id
    kind: FunctionKind
    outcome: Outcome
    cause: Annotated[str, msgspec.Meta(max_length=1000)]
    """One line: exception type and message, or what was returned, or how the process ended."""
    where: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """`file:line` of the failure; empty where it is not known."""
    traceback: Annotated[str, msgspec.Meta(max_length=16384)] = ""
    """Traceback of the first failure; empty in reports of further ones."""
    rollout_id: Id = ""
    """Rollout of the first failure."""
    num_new: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Number of failures for this cause since the last report of it."""
    num_calls: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Number of all calls of the function so far."""


class RewardProcess(Message, frozen=True):
    """A process of a reward model, as its scorer has it."""

    brought_by: Id
    """Number of the request that brought it, in digits: it may be larger than any gauge; 0 of those that the run began with."""
    is_loaded: bool
    """It has loaded the model."""
    is_closed: bool = False
    """It is to leave, and gets no more calls."""
    num_held: int = 0
    """Calls that it has."""
    failed: Text = ""
    """Why it has not loaded the model, and is given up; empty of one that is there."""


class RewardModelLoad(Message, frozen=True):
    """What a scorer has of one reward model."""

    processes: Annotated[dict[int, RewardProcess], msgspec.Meta(max_length=1 << 16)]
    """By their numbers, from 0."""
    busy_s: float
    """Seconds in which processes of it have scored since the scorer started, summed over them."""


class ScorerLoad(Message, frozen=True):
    """A scorer's gauges, sent every second; also its sign of life."""

    scorer_id: int
    num_running: int
    num_scored: int
    busy_s: float
    """Seconds of reward calls since the scorer started, summed over slots."""
    functions: Annotated[dict[Id, FunctionLoad], msgspec.Meta(max_length=4096)] = msgspec.field(default_factory=dict)
    """Statistics by function name; functions that were not called yet are missing."""
    models: Annotated[dict[Id, RewardModelLoad], msgspec.Meta(max_length=4096)] = msgspec.field(default_factory=dict)
    """By the key of its section, for example `reward.1`."""


class Turns(Message, frozen=True):
    """The positions of an episode's turns among the tokens after the prompt. The environment's reply lies between two turns.

    Legend: `K` turns.
    """

    starts: Int32
    """[K] int32, position of each turn's first token; the first is 0, or behind what an environment said first."""
    ends: Int32
    """[K] int32, position of each turn's last token."""
    states: Annotated[tuple[Id, ...], msgspec.Meta(max_length=1 << 16)]
    """[K] name of the state that each turn answers; the names are equal for equal states of sibling rollouts."""
    parents: Int32 | None = None
    """[K] int32, turn that each continues, an earlier one, -1 for a first one; None where each continues the one before it."""
    rewards: Float32 | None = None
    """[K] float32, the environment's own reward of each turn, 0.0 for one that it did not hear; None where it gives none."""

    def __post_init__(self) -> None:
        check_lengths(self, *(name for name in ("starts", "ends", "states", "parents", "rewards") if getattr(self, name) is not None))
        borders = np.stack((self.starts, self.ends), 1).ravel()
        gap = int(self.parents is None)
        if not len(borders) or borders[0] < 0 or (self.ends < self.starts).any() or (self.starts[1:] <= self.ends[:-1] + gap).any():
            raise ValueError(
                f"Turns: from {self.starts.tolist()} to {self.ends.tolist()}, expected at least one, from 0 on, each with a token"
                " and at least one of the environment before the next"
            )
        if self.parents is not None and ((self.parents < -1) | (self.parents >= np.arange(len(self.parents)))).any():
            raise ValueError(f"Turns: parents {self.parents.tolist()}, expected earlier turns, or -1")
        if self.rewards is not None and not np.isfinite(self.rewards).all():
            raise ValueError(f"Turns: rewards {self.rewards.tolist()}, expected finite numbers")

    def mask(self, num_tokens: int) -> Mask:
        """Return [num_tokens] bool, true where the policy sampled the token."""
        sampled = np.zeros(num_tokens, np.bool_)
        for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True):
            sampled[start : end + 1] = True
        return sampled


class RequestKind(enum.StrEnum):
    """The kinds of request that a scorer answers."""

    REWARD = "reward"
    """The reward of one completion."""
    GROUP_REWARD = "group reward"
    """The rewards that compare siblings."""
    ENVIRONMENT = "environment"
    """The environment's reply to the last turn of an episode; of an environment with state also its beginning, before the first."""


class ScorerTask(Message, frozen=True):
    """A task for a scorer: completions of one prompt, and what to do with them."""

    kind: RequestKind
    rollout_id: Id
    """Rollout that the task is about; the first one where it is about siblings."""
    attempt: int
    prompt: Prompt
    completions: Annotated[tuple[Int32, ...], msgspec.Meta(min_length=1, max_length=1 << 16)]
    """Each [T] int32, the tokens after the prompt, which the scorer decodes. There is one completion, or at least two of siblings, in
    order."""
    finishes: tuple[Finish, ...]
    """One for each completion; for an episode, the finish of its last turn."""
    turns: tuple[Turns | None, ...]
    """One for each completion; None in a run without an environment, where the whole completion is one turn, and of an episode that is to
    begin."""

    def __post_init__(self) -> None:
        check_lengths(self, "completions", "finishes", "turns")


class Request(Message, frozen=True):
    """Ask a scorer to do a task. A request id is never used again: a task that is repeated gets a new one, so that a late answer to the old
    request is recognised.
    """

    request_id: int
    task: ScorerTask


class CancelRequest(Message, frozen=True):
    """Tell a scorer that nobody waits for a request any more, and that no answer should follow."""

    request_id: int


class EndEpisode(Message, frozen=True):
    """Tell a scorer that an episode is over: its environment is closed, and the process that held it takes another."""

    rollout_id: Id


class Observation(Message, frozen=True):
    """An environment's reply to a turn."""

    token_ids: Int32
    """int32, at least one token: the reply's text, tokenised by the scorer and never again."""
    state: Id
    """Name of the state that the next turn answers."""

    def __post_init__(self) -> None:
        if not len(self.token_ids):
            raise ValueError("Observation: no token; expected some, or no `Observation` at all where the episode is over")


class Result(Message, frozen=True):
    """A scorer's answer to a `Request`."""

    request_id: int
    outcome: Outcome
    """One outcome for all completions: functions that compare siblings fail together, and a rollout fails with its environment."""
    rewards: Annotated[tuple[float, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """Weighted sum of the components of each completion; empty unless `outcome` is `OK`, and in the answer of an environment."""
    components: Annotated[tuple[Figures, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """One entry for each completion: the reward from each function that applied, by the function's name, before weighting."""
    observation: Observation | None = None
    """None where the environment says that the episode is over, where it failed, and in answers to reward requests."""
    reward: float = 0.0
    """An environment's own reward of the turn."""
    is_lost: bool = False
    """True where the process that held the environment is gone: the episode begins again."""
    has_drifted: bool = False
    """True where the chat template cannot say what follows the sampled turn: the episode is over."""
    error: Text = ""
    """Error message with the function's name; empty where `outcome` is `OK`."""
    duration_s: float = 0.0

    def __post_init__(self) -> None:
        check_lengths(self, "rewards", "components")
        has_values = bool(self.rewards) or self.observation is not None or self.reward != 0.0
        if (has_values and self.outcome is not Outcome.OK) or not all(map(math.isfinite, (*self.rewards, self.reward))):
            got = f"outcome {self.outcome} with rewards {self.rewards}{' and an observation' if self.observation is not None else ''}"
            raise ValueError(f"Result {self.request_id}: {got}; only ok has any, and rewards are finite")


FromScorer = ScorerReady | ScorerLoad | FunctionFailed | Result | PrmReady | PrmLoad | StepsScored | Failed
ToScorer = Request | CancelRequest | EndEpisode | TraceTokens | Cancel | Stop
