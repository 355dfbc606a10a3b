"""Statistics of each reward function: tries, failures by outcome, and the durations of its last calls."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping

from pipelinerl.messages import FunctionLoad, Outcome
from pipelinerl.rewards.pool.limits import BreakerState

NUM_REMEMBERED = 1000
"""Number of calls whose durations are kept. A smaller number makes the p95 jump; a larger one keeps an old slow hour in the figures."""


@dataclasses.dataclass(slots=True)
class _Counts:
    num_calls: int = 0
    num_retries: int = 0
    num_failed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    recent: collections.deque[tuple[float, str]] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=NUM_REMEMBERED))
    """The last calls, as (seconds, rollout id)."""


class FunctionStats:
    """The statistics of every function of a scorer."""

    def __init__(self, *, on_call: Callable[[str, Mapping[str, float]], None] = lambda rollout_id, durations_s: None) -> None:
        """Take `on_call`, which is called for every call with the rollout and the seconds of each function that it entered."""
        self._functions: dict[str, _Counts] = {}
        self._on_call = on_call

    def note(self, durations_s: Mapping[str, float], *, rollout_id: str, failed: str = "", outcome: Outcome = Outcome.OK) -> None:
        """Record a call that entered these functions; where it failed, `failed` is the function that failed."""
        self._on_call(rollout_id, durations_s)
        for name, duration_s in durations_s.items():
            counts = self._functions.setdefault(name, _Counts())
            counts.num_calls += 1
            counts.recent.append((duration_s, rollout_id))
            if name == failed:
                counts.num_failed[str(outcome)] += 1

    def retried(self, name: str) -> None:
        """Record that a failed try is followed by another."""
        self._functions.setdefault(name, _Counts()).num_retries += 1

    def num_calls(self) -> dict[str, int]:
        """Return the number of tries of every function, by name."""
        return {name: counts.num_calls for name, counts in self._functions.items()}

    def report(self, breakers: Mapping[str, BreakerState]) -> dict[str, FunctionLoad]:
        """Return the statistics by function; `breakers` holds the breaker states by function, where there is one."""
        return {name: _load(counts, breakers.get(name, BreakerState.CLOSED)) for name, counts in self._functions.items() if counts.recent}


def _load(counts: _Counts, breaker: BreakerState) -> FunctionLoad:
    ranked = sorted(counts.recent)
    return FunctionLoad(
        num_calls=counts.num_calls,
        num_failed=dict(counts.num_failed),
        num_retries=counts.num_retries,
        p50_s=_quantile(ranked, 0.5),
        p95_s=_quantile(ranked, 0.95),
        max_s=ranked[-1][0],
        slowest=ranked[-1][1],
        breaker=str(breaker),
    )


def _quantile(ranked: list[tuple[float, str]], fraction: float) -> float:
    """Return the smallest value that at least this fraction of the values does not exceed."""
    return ranked[math.ceil(fraction * len(ranked)) - 1][0]
