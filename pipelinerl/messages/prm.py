"""Messages between the orchestrator and process reward models, sent while completions are being written, and what follows from them."""

from __future__ import annotations

import math

from pipelinerl.messages.base import Float32, Id, Int32, Message, Outcome, Text, check_lengths


class PrmReady(Message, frozen=True):
    """A process reward model is loaded and takes traces."""

    prm_id: int
    process_id: int
    version: Id
    """Name of its weights; scores of different weights are never mixed within a trace."""
    request_id: int = 0
    """See `EngineReady`."""


class PrmLoad(Message, frozen=True):
    """A process reward model's gauges since it started, sent every second while it is not inside a forward pass; also its sign of life."""

    prm_id: int
    num_traces: int
    """Number of traces that it is scoring now."""
    num_steps: int
    """Number of steps that it has scored."""
    num_trace_tokens: int
    """Number of the policy's tokens that it has taken."""
    num_computed: int
    """Number of its own tokens that it has computed; a trace costs about one prefill."""
    num_uncached_tokens: int
    """Number of its own tokens that scoring every step from scratch would have cost."""
    busy_s: float
    """Seconds spent on scoring."""
    num_batches: int = 0
    """Number of batches in which it has scored them."""


class TraceTokens(Message, frozen=True):
    """Give a process reward model the next tokens of a trace."""

    rollout_id: Id
    attempt: int
    start: int
    """Position of the first of these among the policy's sampled tokens; 0 begins the trace, also where it was begun before."""
    token_ids: Int32
    """int32, the policy's token ids."""
    is_last: bool
    """True where the trace ends with these tokens."""
    prompt_token_ids: Int32 | None = None
    """[P] int32, the policy's token ids; None unless `start` is 0."""
    turn_ends: Int32 | None = None
    """[K] int32, position of the last token of each turn of an episode, which are its steps; None unless `start` is 0, and of a completion,
    whose steps its text shows."""


class StepsScored(Message, frozen=True):
    """A process reward model has taken tokens of a trace, and scored the steps that they complete, of which there may be none."""

    rollout_id: Id
    attempt: int
    num_taken: int
    """Number of the policy's tokens that it has taken of this trace so far."""
    first: int
    """Index of the first of these steps in its trace."""
    ends: Int32
    """int32, position of each step's last token among the policy's sampled tokens; the positions rise."""
    scores: Float32
    """float32, one for each step."""
    is_last: bool
    """True where the trace is complete and nothing follows."""
    version: Id
    outcome: Outcome = Outcome.OK
    """Outcome of the whole trace so far; a trace with one step that cannot be scored cannot train."""
    error: Text = ""

    def __post_init__(self) -> None:
        check_lengths(self, "ends", "scores")


class TraceScores(Message, frozen=True):
    """The step scores that a process reward model gave a trajectory. Legend: `K` steps."""

    ends: Int32
    """[K] int32, position of each step's last token among the tokens after the prompt; the positions rise."""
    scores: Float32
    """[K] float32, finite."""
    version: Id
    """Version of the process reward model."""

    def __post_init__(self) -> None:
        check_lengths(self, "ends", "scores")


class EarlyStopDecision(Message, frozen=True):
    """The decision about a rollout that a process reward model found hopeless while it was being written: a random draw says whether it
    goes on.
    """

    step: int
    """Index of the step whose score flagged the rollout."""
    predicted: float
    """That step's score: the expected reward of the rollout, known before the draw."""
    probability: float
    """Probability of going on; above 0."""
    stops: bool
    """True where the draw ended the rollout."""

    def __post_init__(self) -> None:
        if not 0.0 < self.probability <= 1.0 or not math.isfinite(self.predicted):
            raise ValueError(
                f"EarlyStopDecision: probability {self.probability}, predicted {self.predicted}; expected one in (0, 1], and finite"
            )

    @property
    def weight(self) -> float:
        """Weight of the rollout in every sum: 0 where it stops, else 1 / probability, so that its mean over the random draw is 1."""
        return 0.0 if self.stops else 1.0 / self.probability
