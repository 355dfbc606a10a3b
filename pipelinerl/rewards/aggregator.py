"""One answer from the pools that scored a sample: the weighted sum of all components, or the first failure. A rule without a clock."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from pipelinerl.messages import Observation, Outcome

Key = tuple[str, int]
"""Rollout id and attempt."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartialResult:
    """What one pool says of a request."""

    outcome: Outcome
    components: tuple[dict[str, float], ...] = ()
    """For each completion; empty unless `outcome` is `OK`."""
    error: str = ""
    duration_s: float = 0.0
    observation: Observation | None = None
    """As of `Result`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TotalResult:
    """What all pools say of it together."""

    outcome: Outcome
    rewards: tuple[float, ...] = ()
    """For each completion; empty unless `outcome` is `OK`."""
    components: tuple[dict[str, float], ...] = ()
    error: str = ""
    duration_s: float = 0.0
    """The longest pool's."""
    unneeded: frozenset[int] = frozenset()
    """RewardPools whose answer nobody needs any more."""


class Aggregator:
    """Requests with pools still to answer. What arrives for any other is dropped."""

    def __init__(self, weights: Mapping[str, float], *, must_apply: bool) -> None:
        self._weights = weights
        self._must_apply = must_apply
        """False where other functions, those that compare siblings, are still to come: then none need apply here."""
        self._missing: dict[Key, set[int]] = {}
        self._parts: dict[Key, list[PartialResult]] = {}

    def expect(self, key: Key, pools: Sequence[int]) -> None:
        """A request was given to these pools; repeating one that is under way changes nothing."""
        if key not in self._missing:
            self._missing[key], self._parts[key] = set(pools), []

    def drop(self, key: Key) -> None:
        """Nobody wants this request any more."""
        self._missing.pop(key, None)
        self._parts.pop(key, None)

    def add(self, key: Key, pool: int, part: PartialResult) -> TotalResult | None:
        """Take in a pool's answer; returns the request's when it is known."""
        missing = self._missing.get(key)
        if missing is None or pool not in missing:
            return None
        missing.remove(pool)
        self._parts[key].append(part)
        if part.outcome is Outcome.OK and missing:
            return None
        parts = self._parts[key]
        self.drop(key)
        if part.outcome is not Outcome.OK:
            return TotalResult(outcome=part.outcome, error=part.error, duration_s=part.duration_s, unneeded=frozenset(missing))
        return self._total(parts)

    def _total(self, parts: list[PartialResult]) -> TotalResult:
        duration_s = max(part.duration_s for part in parts)
        each = zip(*(part.components for part in parts), strict=True)
        components = tuple(dict(itertools.chain.from_iterable(found.items() for found in pools)) for pools in each)
        if self._must_apply and not all(components):
            error = f"no reward function applies: {', '.join(self._weights)} returned None"
            return TotalResult(outcome=Outcome.INVALID, error=error, duration_s=duration_s)
        rewards = tuple(sum(self._weights[name] * value for name, value in found.items()) for found in components)
        for found, reward in zip(components, rewards, strict=True):
            if not math.isfinite(reward):
                error = f"the weighted sum of {found} is {reward}, expected a finite number"
                return TotalResult(outcome=Outcome.INVALID, error=error, duration_s=duration_s)
        return TotalResult(outcome=Outcome.OK, rewards=rewards, components=components, duration_s=duration_s)
