"""Messages between the orchestrator and the gateway, by which programs outside of the run play its rollouts.

A rollout is *lent* to an agent: a lease is one attempt of it, with a name that no other attempt has and a deadline. The orchestrator keeps
the episode's tokens (`pipelinerl.data.episode_graph`); the gateway names the node that a turn continues and the tokens that come behind it.
"""

from __future__ import annotations

import enum
import math
from typing import Annotated

import msgspec

from pipelinerl.messages.base import MAX_REWARD, Failed, Float32, Id, Int32, Message, Prompt, Stop, Text, check_lengths, is_reward
from pipelinerl.messages.engine import Finish, StopText

NO_NODE = -1
"""In place of a node: a turn begins a context of its own; or an answer has none."""


class LeaseEnd(enum.StrEnum):
    """The way a lease ended."""

    FINISHED = "finished"
    """The agent said that the episode is over: the rollout goes to scoring."""
    FAILED = "failed"
    """The agent gave the attempt up."""
    DEADLINE = "deadline"
    """The agent did not finish in time."""
    LOST = "lost"
    """Its gateway or its orchestrator ended, or the lease is not known: nobody's fault, and counted as nobody's."""


class GatewayReady(Message, frozen=True):
    """A gateway listens. Whatever a gateway before it had lent is over: its agents hold connections that are gone."""

    process_id: int
    address: Id
    """URL at which it listens."""


class GatewayLoad(Message, frozen=True):
    """The gateway's gauges, sent every second; also its sign of life."""

    num_open: int = 0
    """Episodes that agents have."""
    num_agents_waiting: int = 0
    """Agents that wait for an episode."""
    num_requests: int = 0
    """HTTP requests answered since it started."""
    num_refused: int = 0
    """Those of them that were refused: no token, an old one, malformed, too large."""
    num_turns: int = 0
    """Turns sampled for agents."""
    num_retried: int = 0
    """Requests that were the same as one before, and got its answer."""
    num_branches: int = 0
    """Turns that began another context than the episode's first: a sub-agent, a compaction."""
    num_drifted: int = 0
    """Turns that went on from one before, and had to be rendered anew all the same: the chat template could not say what stands between."""


class EpisodeWanted(Message, frozen=True):
    """An agent waits for an episode."""

    request_id: int


class EpisodeUnwanted(Message, frozen=True):
    """The agent that waited has gone."""

    request_id: int


class EpisodeLent(Message, frozen=True):
    """An attempt of a rollout, for the agent that waited first."""

    request_id: int
    lease: Id
    rollout_id: Id
    attempt: int
    prompt: Prompt
    deadline_s: float
    """Seconds until it must be finished."""
    max_context_tokens: int
    """Tokens of one path of the episode, its beginning included."""
    models: Annotated[dict[Id, int], msgspec.Meta(max_length=256)] = msgspec.field(default_factory=dict)
    """In a run of several policies: those that turns may be asked of, by name, each with its own `max_context_tokens`. The turns of each
    are of a lease of their own, `part_of`.
    """


class EpisodeReturned(Message, frozen=True):
    """Nobody has taken a lease: its agent was gone before it came. The same attempt number is not lent again."""

    lease: Id


class AgentTurn(Message, frozen=True):
    """Ask for a turn of the model."""

    lease: Id
    request_id: int
    """Names the answer; never used again by this gateway."""
    parent: int
    """The sampled node that the turn goes on from, `NO_NODE` for a context of its own."""
    token_ids: Int32
    """[T] int32, at least one: what stands between that node and the turn."""
    max_tokens: int
    stop: Annotated[tuple[StopText, ...], msgspec.Meta(max_length=16)] = ()
    """Further texts that end the turn, beside `rollout.stop`."""
    chunk_tokens: int = 0
    """The same as in `Generate`."""

    def __post_init__(self) -> None:
        if not len(self.token_ids):
            raise ValueError("AgentTurn: no token, expected at least one: a turn answers something")


class TurnTokens(Message, frozen=True):
    """Tokens of a turn that goes on; `TurnSampled` repeats them."""

    request_id: int
    start: int
    token_ids: Int32


class TurnSampled(Message, frozen=True):
    """The answer to an `AgentTurn`."""

    request_id: int
    node: int
    """Index of the sampled node in the episode's graph; `NO_NODE` where nothing was sampled, and `error` says why."""
    token_ids: Int32
    """[T] int32."""
    logprobs: Float32
    """[T] float32, natural log under the policy that sampled."""
    versions: Int32
    """[T] int32."""
    finish: Finish
    error: Text = ""
    engine_s: float = 0.0
    """Seconds from asking an engine to its answer: whatever else a turn took, the gateway added."""

    def __post_init__(self) -> None:
        check_lengths(self, "token_ids", "logprobs", "versions")


class Posted(Message, frozen=True):
    """The rewards that an agent has posted for what one of several policies has played."""

    model: Id
    reward: float | None = None
    """See `EpisodeFinished`, here and below."""
    nodes: Annotated[tuple[int, ...], msgspec.Meta(max_length=1 << 16)] = ()
    rewards: Annotated[tuple[float, ...], msgspec.Meta(max_length=1 << 16)] = ()

    def __post_init__(self) -> None:
        _check_rewards(self)


class EpisodeFinished(Message, frozen=True):
    """An agent ends its episode."""

    lease: Id
    reward: float | None = None
    """Reward of the whole episode; None where the agent posted none."""
    nodes: Annotated[tuple[int, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """Turns with rewards of their own."""
    rewards: Annotated[tuple[float, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """One for each of `nodes`."""
    error: Text = ""
    """Why the agent gives up; empty where it has finished."""
    posted: Annotated[tuple[Posted, ...], msgspec.Meta(max_length=256)] = ()
    """In place of these rewards, in a run of several policies: those of each policy."""

    def __post_init__(self) -> None:
        _check_rewards(self)


def part_of(lease: str, model: str) -> str:
    """Name the lease of what one of several policies plays in an episode; of one policy alone it is the episode's."""
    return f"{lease}.{model}" if model else lease


def _check_rewards(said: Posted | EpisodeFinished) -> None:
    check_lengths(said, "nodes", "rewards")
    if not all(map(is_reward, (*said.rewards, said.reward or 0.0))):
        raise ValueError(f"{type(said).__name__}: rewards {said.reward} and {list(said.rewards)}, expected up to {MAX_REWARD:g} in size")


class EpisodeExtended(Message, frozen=True):
    """A lease ends later: engines slept meanwhile, and could not answer."""

    lease: Id
    by_s: float


class EpisodeEnded(Message, frozen=True):
    """A lease is over. Whatever else its agent says is refused."""

    lease: Id
    end: LeaseEnd
    reason: Text = ""


class Lent(Message, frozen=True):
    """What only a rollout has that an agent outside of the run has played."""

    prompt_token_ids: Int32
    """[P] int32: what the agent began with, in place of the tokens that siblings of other runs share."""
    reward: float | None = None
    """The reward that the agent posted; None where the run's own functions score the rollout."""
    episode: str = ""
    """Names the episode, which is a rollout of each of several policies; empty in a run of one."""

    def __post_init__(self) -> None:
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"Lent: reward {self.reward}, expected a finite one, or None")


FromGateway = GatewayReady | GatewayLoad | EpisodeWanted | EpisodeUnwanted | EpisodeReturned | AgentTurn | EpisodeFinished | Failed
ToGateway = EpisodeLent | TurnTokens | TurnSampled | EpisodeExtended | EpisodeEnded | Stop
