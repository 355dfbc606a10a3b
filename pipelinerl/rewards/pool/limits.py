"""Decides when the next call of a function may begin: a rate limit, and a circuit breaker for a service that fails. No clock.

The breaker opens after `FAILURES_TO_OPEN` failures in a row. Calls then wait; after a pause one of them is made as a probe (half-open). If
the probe succeeds the breaker closes; if it fails the pause doubles. So a judge that is down for minutes makes requests wait, which slows
admission, and only a handful of them fail; nothing is scored 0.0, and the judge is not flooded when it comes back.
"""

from __future__ import annotations

import enum

FAILURES_TO_OPEN = 5
"""A smaller number opens on chance failures; a larger one sends that many calls to a service that is down."""
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
"""A longer pause leaves a service unused for that long after it is back."""


class BreakerState(enum.StrEnum):
    """The state of a circuit breaker, which says whether calls of a function are made."""

    CLOSED = "closed"
    """All calls are made."""
    OPEN = "open"
    """No call is made until the pause is over."""
    HALF_OPEN = "half-open"
    """One call was made to see whether it succeeds."""


class RateLimiter:
    """The limits of one pool. Times are seconds on one clock of the caller's choice."""

    def __init__(self, *, per_s: float | None = None, has_breaker: bool = False) -> None:
        self.breaker = BreakerState.CLOSED
        self._spacing_s = 0.0 if per_s is None else 1.0 / per_s
        self._has_breaker = has_breaker
        self._next_at = float("-inf")
        """Time at which the rate allows the next call."""
        self._open_until = float("-inf")
        self._pause_s = FIRST_PAUSE_S
        self._num_failures = 0
        """Number of failures in a row."""

    @property
    def is_limited(self) -> bool:
        """True where calls must not be handed out before they may begin."""
        return self._spacing_s > 0.0 or self._has_breaker

    def opens_at(self) -> float:
        """Return the earliest time at which the next call may begin."""
        return self._next_at if self.breaker is BreakerState.CLOSED else max(self._next_at, self._open_until)

    def began(self, now: float) -> None:
        """Record that a call begins now."""
        self._next_at = max(now, self._next_at) + self._spacing_s if self._spacing_s else self._next_at
        if self.breaker is not BreakerState.CLOSED:
            self.breaker = BreakerState.HALF_OPEN
            self._open_until = now + self._pause_s  # a probe that never ends does not keep the limiter shut

    def ended(self, now: float, *, is_failure: bool) -> None:
        """Record that a call ended: with success, or with a timeout or an error."""
        if not self._has_breaker:
            return
        if not is_failure:
            self.breaker, self._num_failures, self._pause_s = BreakerState.CLOSED, 0, FIRST_PAUSE_S
        elif self.breaker is BreakerState.CLOSED:
            self._num_failures += 1
            if self._num_failures >= FAILURES_TO_OPEN:
                self._open(now)
        elif self.breaker is BreakerState.HALF_OPEN:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            self._open(now)

    def _open(self, now: float) -> None:
        self.breaker = BreakerState.OPEN
        self._open_until = now + self._pause_s
