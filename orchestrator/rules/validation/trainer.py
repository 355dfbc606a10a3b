"""This module checks what a trainer says it has done: its next step, the policy after it, a checkpoint of what it has trained.

The orchestrator knows the step, and the trainer owns the weights: what it has truly learned cannot be checked here.
"""

from __future__ import annotations

import dataclasses
import math

import msgspec
import numpy as np

from orchestrator.rules.validation.announcements import gauges
from orchestrator.rules.validation.violations import Kind, Violation
from pipelinerl.messages import (
    CheckpointFailed,
    CheckpointSaved,
    ComputeLogprobs,
    LogprobsComputed,
    PolicyPublished,
    StepDone,
    TakeMicroBatch,
)

MAX_PULLS = 64
"""Rows that a replica may have asked for and not been given. Our trainer asks for two; a larger value only lets a dishonest one fill
memory.
"""
MAX_STEPS_AHEAD = 3
"""Rows may be asked for of so many steps after the one that is not done yet. A replica pulls one ahead, and may hear of the end of a step
before the replica that reports it; a larger value only lets a dishonest one fill memory.
"""
MAX_FIGURES = 1024
"""The most figures of a step, which become one line of the journal."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerProgress:
    """The position of a trainer, as the orchestrator knows it."""

    num_done: int
    """Steps in its weights."""
    is_next_closed: bool
    """True where the step after them has all its rows."""
    num_steps: int
    """Steps of the run."""

    @property
    def newest_version(self) -> int:
        """The newest version that it can have: it publishes a policy before it says that the step is done, or after."""
        return min(self.num_done + self.is_next_closed, self.num_steps)


def step_done(said: StepDone, progress: TrainerProgress) -> Violation | None:
    """Check that a step is done once, in order, after its last row."""
    if said.step != progress.num_done or not progress.is_next_closed:
        expected = f"{progress.num_done}, once it is closed" if not progress.is_next_closed else f"{progress.num_done}"
        return Violation(kind=Kind.STEPS, words=f"StepDone: step {said.step}, expected {expected}")
    if len(said.metrics) > MAX_FIGURES:
        return Violation(kind=Kind.BOUNDS, words=f"StepDone: {len(said.metrics)} figures, expected at most {MAX_FIGURES}")
    return None


def figures(said: StepDone) -> tuple[StepDone, list[Violation]]:
    """Return a step that is done with what is possible of its figures, and the violations in the others: the step stands, since its weights
    are what they are.
    """
    violations = []
    finite = {name: value for name, value in said.metrics.items() if math.isfinite(value)}
    if len(finite) < len(said.metrics):
        others = ", ".join(f"{name[:100]} {value}" for name, value in said.metrics.items() if name not in finite)
        violations.append(Violation(kind=Kind.BOUNDS, words=f"StepDone of step {said.step}: {others[:1000]}, expected finite figures"))
    engines = said.engines
    if wrong := [one for one in engines if min(one.num_tokens, one.num_sequences) < 0 or not math.isfinite(one.kl_sum)]:
        engines = ()
        words = f"StepDone of step {said.step}: {wrong[0]}, expected finite figures from 0"
        violations.append(Violation(kind=Kind.BOUNDS, words=words))
    return msgspec.structs.replace(said, metrics=finite, engines=engines), violations


def policy_published(said: PolicyPublished, progress: TrainerProgress) -> Violation | None:
    """Check that a policy is not newer than the step it comes after.

    Older policies are announced again to an orchestrator that takes another's place.
    """
    if not 0 <= said.version <= progress.newest_version or said.rollback_epoch < 0:
        expected = f"at most {progress.newest_version}, after step {progress.num_done}"
        return Violation(
            kind=Kind.STEPS, words=f"PolicyPublished: version {said.version} of rollback epoch {said.rollback_epoch}, expected {expected}"
        )
    return gauges(said)


def logprobs_computed(said: LogprobsComputed, *, asked: ComputeLogprobs | None) -> Violation | None:
    """Check an answer against what was `asked`, where it answers that: a finite number, at most 0, for every token with a loss."""
    if asked is None or said.request_id != asked.request_id:
        return None
    expected = sum(int(row.loss_mask.sum()) for row in asked.rows)
    if len(said.logprobs) != expected:
        words = f"LogprobsComputed: {len(said.logprobs)} numbers, expected {expected}, one for each token with a loss"
        return Violation(kind=Kind.BOUNDS, words=words)
    wrong = ~(np.isfinite(said.logprobs) & (said.logprobs <= 0))
    if wrong.any():
        return Violation(kind=Kind.BOUNDS, words=f"LogprobsComputed: {said.logprobs[wrong][0]}, expected finite numbers, at most 0")
    return None


def checkpoint_saved(said: CheckpointSaved, progress: TrainerProgress, *, commit: str | None) -> Violation | None:
    """Check that a checkpoint holds what was trained, since its samples are then forgotten.

    `commit` is the ledger's, of the step before that version.
    """
    if not 0 < said.version <= progress.num_done or said.commit != commit:
        expected = f"at most {progress.num_done}, of commit {commit!r}"
        got = f"version {said.version} of commit {said.commit[:100]!r}"
        return Violation(kind=Kind.STEPS, words=f"CheckpointSaved: {got}, expected {expected}")
    if said.oldest is not None and not 0 <= said.oldest <= said.version:
        expected = f"0 to {said.version}: what it can start from itself"
        return Violation(kind=Kind.STEPS, words=f"CheckpointSaved: oldest version {said.oldest}, expected {expected}")
    return gauges(said)


def checkpoint_failed(said: CheckpointFailed, progress: TrainerProgress) -> Violation | None:
    """Check that a checkpoint that could not be written was of what was trained."""
    if 0 < said.version <= progress.num_done:
        return None
    return Violation(kind=Kind.STEPS, words=f"CheckpointFailed: version {said.version}, expected 1 to {progress.num_done}")


def pull(said: TakeMicroBatch, progress: TrainerProgress, *, num_asked: int, is_starting: bool) -> Violation | None:
    """Check that a row is asked for of a step that is not done; `num_asked` requests of this replica are without an answer.

    While a trainer `is_starting`, its position is not known yet.
    """
    first, last = 0 if is_starting else progress.num_done, progress.num_steps if is_starting else progress.num_done + MAX_STEPS_AHEAD
    if not first <= said.step <= last or said.index < 0:
        wrong = f"row {said.index} of step {said.step}, expected one of steps {first} to {last}"
        return Violation(kind=Kind.STEPS, words=f"TakeMicroBatch: {wrong}: those before are done")
    if num_asked >= MAX_PULLS:
        return Violation(
            kind=Kind.BOUNDS, words=f"TakeMicroBatch: {num_asked} rows asked for and not answered, expected fewer than {MAX_PULLS}"
        )
    return None
