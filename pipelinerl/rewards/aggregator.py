"""Makes one result of the answers of all pools that worked on a request: the weighted sum of the components, or the first failure.

It is a rule without a clock.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping

from pipelinerl.messages import Outcome, Result
from pipelinerl.rewards.calls import CallResult


@dataclasses.dataclass(slots=True, kw_only=True)
class Aggregator:
    """One request that some pool has still to answer."""

    request_id: int
    weights: Mapping[str, float]
    """Weights of all functions that may apply, by name."""
    must_apply: bool
    """True where some function must apply to every completion; false where functions that compare siblings are still to come."""
    missing: set[int]
    """The pools that have not answered."""
    _answers: list[CallResult] = dataclasses.field(default_factory=list)

    def add(self, pool: int, answer: CallResult) -> Result | None:
        """Take a pool's answer, and return the result of the request once it is known. One failed pool ends the wait for all others."""
        if pool not in self.missing:
            return None
        self.missing.remove(pool)
        self._answers.append(answer)
        if answer.outcome is not Outcome.OK:
            return self._failed(answer.outcome, answer.error, duration_s=answer.duration_s, is_lost=answer.is_lost)
        return None if self.missing else self._total()

    def _total(self) -> Result:
        duration_s = max(answer.duration_s for answer in self._answers)
        each = zip(*(answer.components for answer in self._answers), strict=True)
        components = tuple(dict(itertools.chain.from_iterable(found.items() for found in pools)) for pools in each)
        rewards = tuple(sum(self.weights[name] * value for name, value in found.items()) for found in components)
        if self.must_apply and not all(components):
            error = f"no reward function applies: {', '.join(self.weights)} returned None"
            return self._failed(Outcome.INVALID, error, duration_s=duration_s)
        for found, reward in zip(components, rewards, strict=True):
            if not math.isfinite(reward):
                error = f"the weighted sum of {found} is {reward}, expected a finite number"
                return self._failed(Outcome.INVALID, error, duration_s=duration_s)
        return Result(
            request_id=self.request_id,
            outcome=Outcome.OK,
            rewards=rewards,
            components=components,
            observation=self._answers[0].observation,
            reward=self._answers[0].reward,
            has_drifted=self._answers[0].has_drifted,
            duration_s=duration_s,
        )

    def _failed(self, outcome: Outcome, error: str, *, duration_s: float, is_lost: bool = False) -> Result:
        return Result(request_id=self.request_id, outcome=outcome, error=error, duration_s=duration_s, is_lost=is_lost)
