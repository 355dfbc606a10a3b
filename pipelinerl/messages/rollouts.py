"""The stages of a rollout inside the orchestrator, one class each, from its finished trajectory to the samples that train."""

from __future__ import annotations

import enum
import math

import msgspec
import numpy as np

from pipelinerl.messages.base import Figures, Float32, Id, Int32, Mask, Message, Nodes, Outcome, Prompt, Text, check_lengths
from pipelinerl.messages.engine import Finish, Recomputed, Routes
from pipelinerl.messages.gateway import Lent
from pipelinerl.messages.prm import EarlyStopDecision, TraceScores
from pipelinerl.messages.scorer import Turns


class TerminalStatus(enum.StrEnum):
    """The way an admitted rollout ended. Every admitted rollout gets exactly one of these."""

    TRAINED = "trained"
    """Its gradient is in the policy of a completed step."""
    FILTERED = "filtered"
    """A rule dropped it on purpose, for example because the rewards of its group are all equal."""
    STALE = "stale"
    """Its oldest token was older than the staleness bound when its batch was cut."""
    FAILED = "failed"
    """It has no usable score: the engine or a reward function failed."""
    CANCELLED = "cancelled"
    """The run ended, or it was withdrawn, before it was trained."""


class Trajectory(Message, frozen=True):
    """A finished rollout: the whole token sequence as the engine saw and sampled it.

    An episode that branches has its nodes end to end, each token once, first the prompt. So every sampled token is in the loss once, what
    sums over tokens is right whatever the shape, and a rollout is placed, trained and recorded whole; its rows are made where the trainer
    lays it out (`trainer.rows.branches`).
    """

    rollout_id: Id
    group_id: int
    sibling: int
    """0 .. group size - 1 for a sibling; the group size for a greedy rollout."""
    attempt: int
    prompt: Prompt
    token_ids: Int32
    """[L] int32, including the prompt."""
    loss_mask: Mask
    """[L] bool, true where the policy sampled the token."""
    logprobs: Float32
    """[L] float32, natural log under the policy that sampled; 0.0 where `loss_mask` is false."""
    versions: Int32
    """[L] int32, version that sampled the token; `UNSAMPLED` where `loss_mask` is false."""
    finish: Finish
    error: Text = ""
    engine_id: int = -1
    admitted_at: float = 0.0
    """Seconds on the run's clock."""
    finished_at: float = 0.0
    """Seconds on the run's clock."""
    routes: Routes | None = None
    """[L - 1] rows, with the meaning they have in `Completion`."""
    turns: Turns | None = None
    """None in a run without an environment, and where nothing was sampled."""
    outcome: Outcome = Outcome.OK
    """Outcome of its environment. Where that is not `OK`, `finish` is `ERROR`, and the rollout fails with this outcome."""
    recomputed: Recomputed = ()
    """The same as in `Completion`, counted over the tokens after the prompt."""
    lent: Lent | None = None
    """None where the run's own loop has played it."""
    is_greedy: bool = False
    """True where it was sampled at temperature 0 beside its siblings. It serves only for its reward, which is their baseline, and never
    trains."""
    nodes: Nodes | None = None
    """Its nodes, in the order of the tokens; None where it is one sequence."""

    def __post_init__(self) -> None:
        check_lengths(self, "token_ids", "loss_mask", "logprobs", "versions")
        if self.nodes is not None:
            self.nodes.check(self.versions, self.loss_mask, owner=f"Trajectory {self.rollout_id}")
        if self.routes is not None and self.routes.num_rows != len(self.token_ids) - 1:
            rows, expected = self.routes.num_rows, len(self.token_ids) - 1
            raise ValueError(f"Trajectory {self.rollout_id}: routes of {rows} tokens, expected {expected}, all but the last")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Size of the token columns (ids, loss mask, log-probabilities, versions), of the expert routes, and of the prompt's images."""
        size = 13 * len(self.token_ids) + (0 if self.routes is None else self.routes.experts.nbytes)
        return size + sum(map(len, self.prompt.images)) if self.prompt.images else size

    @property
    def num_trained_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))


class Score(Message, frozen=True):
    """The reward of a trajectory, or the reason why it has none."""

    rollout_id: Id
    attempt: int
    outcome: Outcome
    reward: float | None
    """Weighted sum of the components; None unless `outcome` is `OK`."""
    components: Figures = msgspec.field(default_factory=dict)
    """Reward from each function that applied, by the function's name, before weighting."""
    error: Text = ""
    """Error message with the function's name; empty where `outcome` is `OK`."""
    duration_s: float = 0.0

    def __post_init__(self) -> None:
        has_reward = self.reward is not None and math.isfinite(self.reward)
        if has_reward != (self.outcome is Outcome.OK) or (self.reward is not None and not has_reward):
            raise ValueError(
                f"Score {self.rollout_id}: outcome {self.outcome} with reward {self.reward}; only ok has one, and it is finite"
            )


class ScoredTrajectory(Message, frozen=True):
    """A trajectory with its score, its step scores and its early-stop decision."""

    trajectory: Trajectory
    score: Score
    steps: TraceScores | None = None
    """None in a run without a process reward model, and where it could not score the trace. A stopped trace has scores up to the stop."""
    early_stop: EarlyStopDecision | None = None
    """None where nothing was drawn: the rollout then went on with probability 1."""

    @property
    def weight(self) -> float:
        """Weight of the rollout in every sum over rollouts that were started."""
        return 1.0 if self.early_stop is None else self.early_stop.weight


class Group(Message, frozen=True):
    """The sibling rollouts of one prompt, all finished and all scored (whatever the outcome)."""

    group_id: int
    members: tuple[ScoredTrajectory, ...]


class Sample(Message, frozen=True):
    """One training row: a trajectory with an advantage for each token."""

    trajectory: Trajectory
    reward: float
    advantages: Float32
    """[L] float32; 0.0 for tokens that are not trained."""
    weight: float = 1.0
    """Factor of its part of the loss: 1 / the probability with which it was not stopped early."""

    def __post_init__(self) -> None:
        if len(self.advantages) != self.trajectory.num_tokens:
            got, expected = len(self.advantages), self.trajectory.num_tokens
            raise ValueError(f"Sample {self.trajectory.rollout_id}: {got} advantages for {expected} tokens; expected one for each")

    @property
    def num_tokens(self) -> int:
        return self.trajectory.num_tokens

    @property
    def num_useful_tokens(self) -> int:
        """Trained tokens whose advantage is not zero."""
        return int(np.count_nonzero(self.advantages))
