"""What the orchestrator and process reward models say to each other while completions are being written."""

from __future__ import annotations

from pipelinerl.messages.base import Float32, Id, Int32, Message, Outcome, Text, check_lengths


class PrmReady(Message, frozen=True):
    """A process reward model is loaded."""

    prm_id: int
    process_id: int
    version: Id
    """Name of its weights: scores of different ones are never mixed within a trace."""


class PrmLoad(Message, frozen=True):
    """Its gauges since it started, sent every second while it is not inside a forward pass; also its sign of life."""

    prm_id: int
    num_traces: int
    """Being followed."""
    num_steps: int
    """Steps scored."""
    num_taken: int
    """Tokens of the policy taken."""
    num_computed: int
    """Tokens of its own computed: a trace costs about one prefill."""
    num_asked: int
    """Tokens of its own that every step from scratch would have cost."""
    busy_s: float


class TraceTokens(Message, frozen=True):
    """Tell a process reward model how a trace goes on."""

    rollout_id: Id
    attempt: int
    start: int
    """Position of the first of these among the policy's sampled tokens; 0 begins the trace, anew where it was begun before."""
    token_ids: Int32
    """int32, of the policy."""
    is_last: bool
    prompt_token_ids: Int32 | None = None
    """[P] int32, of the policy; None but where `start` is 0."""


class StepsScored(Message, frozen=True):
    """A process reward model has taken tokens of a trace, and scored the steps that they complete: maybe none."""

    rollout_id: Id
    attempt: int
    num_taken: int
    """Tokens of the policy taken so far."""
    first: int
    """Index of the first of these steps in its trace."""
    ends: Int32
    """int32, position of each step's last token among the policy's sampled tokens; rises."""
    scores: Float32
    """float32, one for each step."""
    is_last: bool
    """The trace is complete: nothing follows."""
    version: Id
    outcome: Outcome = Outcome.OK
    """Of the whole trace so far; a trace with one step that cannot be scored cannot train."""
    error: Text = ""

    def __post_init__(self) -> None:
        check_lengths(self, "ends", "scores")
