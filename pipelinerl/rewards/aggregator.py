"""Makes one result of the answers of all pools that worked on a request: the weighted sum of the components, or the first failure.

It is a rule without a clock.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from pipelinerl.messages import Observation, Outcome, Result


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartialResult:
    """The answer of one pool to a request."""

    outcome: Outcome
    components: tuple[dict[str, float], ...] = ()
    """Values by function name for each completion; empty unless `outcome` is `OK`, and in the answer of an environment."""
    observation: Observation | None = None
    """The same as in `Result`."""
    error: str = ""
    duration_s: float = 0.0


class Aggregator:
    """The requests that some pool has still to answer. Answers to any other request are dropped."""

    def __init__(self, weights: Mapping[str, float], *, must_apply: bool) -> None:
        self._weights = weights
        self._must_apply = must_apply
        """True where some function must apply to every completion; false where functions that compare siblings are still to come."""
        self._missing: dict[int, set[int]] = {}
        """The pools that have not answered, by request."""
        self._parts: dict[int, list[PartialResult]] = {}

    def expect(self, request_id: int, pools: Sequence[int]) -> None:
        """Record that a request was given to these pools."""
        self._missing[request_id], self._parts[request_id] = set(pools), []

    def drop(self, request_id: int) -> None:
        """Forget a request that nobody wants any more."""
        self._missing.pop(request_id, None)
        self._parts.pop(request_id, None)

    def add(self, request_id: int, pool: int, part: PartialResult) -> Result | None:
        """Take a pool's answer, and return the result of the request once it is known. One failed pool ends the wait for all others."""
        missing = self._missing.get(request_id)
        if missing is None or pool not in missing:
            return None
        missing.remove(pool)
        parts = self._parts[request_id]
        parts.append(part)
        if part.outcome is Outcome.OK and missing:
            return None
        self.drop(request_id)
        if part.outcome is not Outcome.OK:
            return Result(request_id=request_id, outcome=part.outcome, error=part.error, duration_s=part.duration_s)
        return self._total(request_id, parts)

    def _total(self, request_id: int, parts: list[PartialResult]) -> Result:
        duration_s = max(part.duration_s for part in parts)
        each = zip(*(part.components for part in parts), strict=True)
        components = tuple(dict(itertools.chain.from_iterable(found.items() for found in pools)) for pools in each)
        rewards = tuple(sum(self._weights[name] * value for name, value in found.items()) for found in components)
        error = ""
        if self._must_apply and not all(components):
            error = f"no reward function applies: {', '.join(self._weights)} returned None"
        elif (wrong := next((n for n, reward in enumerate(rewards) if not math.isfinite(reward)), None)) is not None:
            error = f"the weighted sum of {components[wrong]} is {rewards[wrong]}, expected a finite number"
        if error:
            return Result(request_id=request_id, outcome=Outcome.INVALID, error=error, duration_s=duration_s)
        return Result(
            request_id=request_id,
            outcome=Outcome.OK,
            rewards=rewards,
            components=components,
            observation=parts[0].observation,
            duration_s=duration_s,
        )
