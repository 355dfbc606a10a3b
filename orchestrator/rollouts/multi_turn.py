"""An episode: the model and an environment take turns, each of which continues a node of the episode's graph (usually the last).

Tokens are never made twice: the model's are the engine's ids, the environment's are the ids its text was tokenised to once, and each turn
is asked for with all of them before it. So versions and log-probabilities stay those under which each token was sampled.

An environment with state is reset before the first turn: what it says then stands behind the prompt. It hears every whole turn, the last
too, since it rewards each. Where its process is lost the episode begins again from the prompt, in a new attempt (`restarted`).

An episode ends when the environment says so, after `max_turns`, or when `max_tokens` after the prompt leave no room for the environment's
reply and one more token: then it is truncated, and scored as it is. It ends with the model's tokens, since nothing after them would be
trained on. This is a rule, without clock and socket; each step gives a new value.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from orchestrator.rollouts.trajectories import trajectory_of, turns_of
from pipelinerl.data.episode_graph import EpisodeGraph, Node
from pipelinerl.messages import Completion, Finish, Int32, Outcome, Prompt, Result, Trajectory, Turns

FIRST_STATE = "prompt"
"""The state that the first turn of every sibling answers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The turns of a rollout so far."""

    prompt: Prompt
    max_tokens: int
    """Tokens after the prompt, the environment's and those of all branches included."""
    max_turns: int
    is_stateful: bool = False
    """True for an environment with state."""
    num_restarts: int = 0
    """Times that it began again, because the process that held its environment was lost."""
    has_drifted: bool = False
    """True where it ended because the chat template cannot say what follows a sampled turn."""
    graph: EpisodeGraph = dataclasses.field(default_factory=EpisodeGraph)
    """The prompt as node 0, then turns and replies; by default the prompt alone."""
    at: int = 0
    """The node that the next turn continues."""
    state: str = FIRST_STATE
    """The state that the next turn answers."""
    recomputed: tuple[tuple[int, int], ...] = ()
    """(node, sampled tokens of it) before which a swap had the KV cache computed anew."""
    finish: Finish = Finish.STOP
    """The finish of the last turn; `LENGTH` where there is no room for another."""
    outcome: Outcome = Outcome.OK
    """The outcome of the environment."""
    error: str = ""
    is_over: bool = False
    """True where no turn follows."""

    def __post_init__(self) -> None:
        if not self.graph.nodes:
            object.__setattr__(self, "graph", self.graph.append(Node.given(self.prompt.token_ids)))

    @property
    def num_turns(self) -> int:
        return sum(node.is_sampled for node in self.graph.nodes)

    @property
    def num_left(self) -> int:
        """The most tokens that the next turn may have."""
        return self.max_tokens - (self.graph.num_tokens - len(self.prompt.token_ids))

    @property
    def num_bytes(self) -> int:
        """Bytes of its token columns."""
        return 12 * self.graph.num_tokens

    @property
    def context(self) -> Int32:
        """[P + T] int32, the tokens that the next turn continues."""
        return self.graph.context(self.at)

    @property
    def token_ids(self) -> Int32:
        """[T] int32, the same after the prompt, with which a context begins unless it is a fresh one."""
        return np.concatenate([np.zeros(0, np.int32), *(node.token_ids for node in self._line())])

    @property
    def newest_version(self) -> int:
        """The version of the last sampled token; -1 before there is one. No engine that holds an older version may go on."""
        return self.graph.newest_version(self.at)

    @property
    def turns(self) -> Turns | None:
        """The turns that the next one continues; None before the first."""
        nodes = self._line()
        starts = np.cumsum([0, *(node.num_tokens for node in nodes)]).tolist()
        return turns_of(nodes, range(-1, len(nodes) - 1), starts=starts)

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
        after = self
        if has_tokens := len(completion.token_ids) > 0:
            after = self._after(Node.sampled_by(completion, parent=self.at, state=self.state))
        if has_tokens and self.is_stateful:
            after = after._rewarded(0.0)  # until it is heard, which a turn that was cut off is not
        return dataclasses.replace(
            after,
            recomputed=(*self.recomputed, *((after.at, at) for at in completion.recomputed if has_tokens)),
            finish=completion.finish,
            error=completion.error,
            is_over=completion.finish is not Finish.STOP or not has_tokens or (after.num_turns >= self.max_turns and not self.is_stateful),
        )

    def observe(self, result: Result) -> Episode:
        """Return the episode after the environment's reply to the last turn; to an episode before its first, after its reset."""
        if result.outcome is not Outcome.OK:
            error = f"environment: {result.error}"
            return dataclasses.replace(self, finish=Finish.ERROR, outcome=result.outcome, error=error, is_over=True)
        observation, is_reset = result.observation, not self.num_turns
        heard = self._rewarded(result.reward) if self.is_stateful and not is_reset else self
        if observation is None or self.num_turns >= self.max_turns:
            return dataclasses.replace(heard, is_over=not is_reset or observation is not None, has_drifted=result.has_drifted)
        num_observed = len(observation.token_ids)
        if num_observed >= self.num_left:
            if is_reset:
                error = f"environment: its reset says {num_observed} tokens, and rollout.max_tokens is {self.max_tokens}"
                return dataclasses.replace(self, finish=Finish.ERROR, outcome=Outcome.INVALID, error=error, is_over=True)
            return dataclasses.replace(heard, finish=Finish.LENGTH, is_over=True)
        return dataclasses.replace(heard._after(Node.given(observation.token_ids, parent=self.at)), state=observation.state)

    def trajectory(self, **facts: Any) -> Trajectory:
        """Return the trajectory of the episode; `facts` are those fields of a trajectory that no turn changes."""
        own = {name: getattr(self, name) for name in ("recomputed", "finish", "error", "outcome")}
        return trajectory_of(self.prompt, self.graph, **own, **facts)

    def _after(self, node: Node) -> Episode:
        return dataclasses.replace(self, graph=self.graph.append(node), at=len(self.graph.nodes))

    def _rewarded(self, reward: float) -> Episode:
        return dataclasses.replace(self, graph=self.graph.with_reward(self.at, reward))

    def _line(self) -> list[Node]:
        """Return the nodes that the next turn continues, without the prompt."""
        return [self.graph.nodes[index] for index in self.graph.path(self.at) if index]
