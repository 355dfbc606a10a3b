"""This module checks a scorer's answers: figures must be finite, of functions that the config names, and must add up."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np

from orchestrator.rules.validation.completions import CompletionCheck
from orchestrator.rules.validation.violations import Kind, Violation
from pipelinerl.messages import Int32, Outcome, RequestKind, Result, ScorerTask, StepsScored

SUM_TOLERANCE = 1e-6
"""The relative tolerance between a reward and the weighted sum of its components, which were added in another order."""


class ScoreCheck:
    """The check returns the violation in a scorer's answer."""

    def __init__(self, *, weights: Mapping[str, float], completion_check: CompletionCheck) -> None:
        """Take the `weights` of every reward function, by its name in the config; `completion_check` knows the vocabulary."""
        self._weights = weights
        self._completion_check = completion_check

    def answer(self, said: Result, asked: ScorerTask) -> Violation | None:
        """Return the first violation, or None. The caller knows that this is an answer to this request."""
        about = f"Result of {asked.kind} of {asked.rollout_id[:100]}, attempt {asked.attempt}"
        if not (math.isfinite(said.duration_s) and said.duration_s >= 0.0):
            return Violation(kind=Kind.BOUNDS, words=f"{about}: it took {said.duration_s} s, expected a finite number from 0")
        if said.outcome is Outcome.STOPPED:  # which is this orchestrator's own word
            return Violation(kind=Kind.SCORES, words=f"{about}: outcome stopped, expected ok, timeout, error or invalid")
        if said.outcome is not Outcome.OK:
            return None
        is_environment = asked.kind is RequestKind.ENVIRONMENT
        if said.reward and not is_environment:
            return Violation(kind=Kind.SCORES, words=f"{about}: an environment's reward {said.reward}, expected rewards")
        if said.observation is not None and not is_environment:
            return Violation(kind=Kind.SCORES, words=f"{about}: an observation, expected rewards")
        num_expected = 0 if is_environment else len(asked.completions)
        if len(said.rewards) != num_expected:
            return Violation(kind=Kind.SCORES, words=f"{about}: {len(said.rewards)} rewards, expected {num_expected}")
        if said.observation is not None:
            return self._completion_check.ids(said.observation.token_ids, about=about)
        violations = (self._sum(found, reward, about=about) for reward, found in zip(said.rewards, said.components, strict=True))
        return next((violation for violation in violations if violation is not None), None)

    def _sum(self, components: Mapping[str, float], reward: float, *, about: str) -> Violation | None:
        if unknown := _unknown(components, self._weights):
            return Violation(kind=Kind.SCORES, words=f"{about}: a score of {unknown}, expected {', '.join(self._weights)}")
        if not all(map(math.isfinite, components.values())):
            return Violation(kind=Kind.SCORES, words=f"{about}: components {dict(components)}, expected finite ones")
        expected = sum(self._weights[name] * value for name, value in components.items())
        scale = sum(abs(self._weights[name] * value) for name, value in components.items())
        if abs(reward - expected) <= SUM_TOLERANCE * max(1.0, scale):
            return None
        return Violation(
            kind=Kind.SCORES, words=f"{about}: reward {reward:g}, expected {expected:g}, the weighted sum of {dict(components)}"
        )


def steps_scored(said: StepsScored, *, num_sent: int, last_end: int, turn_ends: Int32 | None = None) -> Violation | None:
    """Return the violation in a process reward model's answer to `num_sent` tokens of a trace; None where all is well.

    The last scored step of the trace ended at `last_end` (-1 where none has been scored). The steps of an episode are its turns, which end
    at `turn_ends`.
    """
    about = f"StepsScored of rollout {said.rollout_id}, attempt {said.attempt}"
    if not 0 <= said.num_taken <= num_sent:
        return Violation(kind=Kind.LENGTH, words=f"{about}: {said.num_taken} tokens taken, expected at most {num_sent}, as were sent")
    ends = np.concatenate((np.array([last_end]), said.ends))
    if len(said.ends) and ((np.diff(ends) < 0).any() or int(ends[-1]) >= said.num_taken):
        expected = f"rising, after {last_end} and before {said.num_taken}"
        return Violation(kind=Kind.SCORES, words=f"{about}: steps end at {said.ends[:20].tolist()}, expected {expected}")
    if turn_ends is not None and said.outcome is Outcome.OK:
        num_last = len(turn_ends) if said.is_last else said.first + len(said.ends)
        if not np.array_equal(said.ends, expected := turn_ends[said.first : num_last]):
            words = f"{about}: turns end at {said.ends[:20].tolist()}, expected {expected[:20].tolist()}, as was sent"
            return Violation(kind=Kind.SCORES, words=words)
    if said.outcome is Outcome.OK and not np.isfinite(said.scores).all():
        return Violation(kind=Kind.SCORES, words=f"{about}: scores {said.scores[:20].tolist()}, expected finite ones")
    return None


def _unknown(components: Collection[str], weights: Mapping[str, float]) -> str:
    """Return the first function that the config does not name, shortened: a peer may send a name of any length."""
    return next((name[:100] for name in components if name not in weights), "")
