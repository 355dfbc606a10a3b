"""What the process reward model is told of one attempt of a rollout, and has said of it so far."""

from __future__ import annotations

import dataclasses

import numpy as np

from orchestrator.peers.prm import PrmEngine
from pipelinerl.messages import EarlyStopDecision, Int32, Outcome, ScoredTrajectory, TraceScores, TraceTokens


@dataclasses.dataclass(slots=True, kw_only=True)
class Trace:
    """One attempt of a rollout: the tokens known so far, and the model's scores of its steps."""

    rollout_id: str
    attempt: int
    prompt_token_ids: Int32
    engine: PrmEngine | None = None
    """The engine of the model that has it; None while none serves, and where the model has no more to say."""
    turn_ends: Int32 | None = None
    """Positions of the last tokens of an episode's turns; None for a completion, whose steps the model's process finds."""
    token_ids: Int32 = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    """Tokens that were sampled, which the model's engine was sent."""
    is_whole: bool = False
    """True once its last token is among them."""
    num_taken: int = 0
    """Tokens that the model has answered for."""
    ends: list[int] = dataclasses.field(default_factory=list)
    scores: list[float] = dataclasses.field(default_factory=list)
    version: str = ""
    is_done: bool = False
    """True where the model will say nothing more about it."""
    outcome: Outcome = Outcome.OK
    error: str = ""
    num_deaths: int = 0
    decision: EarlyStopDecision | None = None
    """The outcome of its coin; None while none was tossed."""
    decided_at: int = 0
    """Tokens sent when the coin was tossed."""
    waiting: ScoredTrajectory | None = None
    """The scored trajectory that waits for its step scores."""

    def whole(self) -> TraceTokens:
        """Return the message that begins the trace at an engine, with all that is known of it."""
        return TraceTokens(
            rollout_id=self.rollout_id,
            attempt=self.attempt,
            start=0,
            token_ids=self.token_ids,
            is_last=self.is_whole,
            prompt_token_ids=self.prompt_token_ids,
            turn_ends=self.turn_ends,
        )

    def begin_anew(self) -> None:
        """Forget what the model has said."""
        self.num_taken, self.ends, self.scores, self.version = 0, [], [], ""

    def result(self) -> TraceScores:
        """Return the scores of its steps."""
        return TraceScores(ends=np.array(self.ends, np.int32), scores=np.array(self.scores, np.float32), version=self.version)
