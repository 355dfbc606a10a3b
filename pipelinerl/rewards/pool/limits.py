"""Decides when the next call of a function may begin: a rate limit, and a circuit breaker for a service that fails. No clock.

Times are seconds on one clock of the caller's choice.
"""

from __future__ import annotations

import enum

FAILURES_TO_OPEN = 5
"""A smaller number opens on chance failures; a larger one sends that many calls to a service that is down."""
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
"""A longer pause leaves a service unused for that long after it is back."""


class RateLimit:
    """Spaces the beginnings of calls evenly; time in which none began is not saved up."""

    def __init__(self, per_s: float) -> None:
        self.opens_at = float("-inf")
        """The earliest time at which the next call may begin."""
        self._spacing_s = 1.0 / per_s

    def began(self, now: float) -> None:
        """Record that a call begins now."""
        self.opens_at = max(now, self.opens_at) + self._spacing_s


class BreakerState(enum.StrEnum):
    """The state of a circuit breaker, which says whether calls of a function are made."""

    CLOSED = "closed"
    """All calls are made."""
    OPEN = "open"
    """No call is made until the pause is over."""
    HALF_OPEN = "half-open"
    """One call was made to see whether it succeeds."""


class CircuitBreaker:
    """Opens after `FAILURES_TO_OPEN` failures in a row.

    Calls then wait; after a pause one of them is made as a probe (half-open). If the probe succeeds the breaker closes; if it fails the
    pause doubles. So a judge that is down for minutes makes requests wait, which slows admission, and only a handful of them fail; nothing
    is scored 0.0, and the judge is not flooded when it comes back.
    """

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self._open_until = float("-inf")
        self._pause_s = FIRST_PAUSE_S
        self._num_failures = 0
        """Number of failures in a row."""

    @property
    def opens_at(self) -> float:
        """The earliest time at which the next call may begin."""
        return float("-inf") if self.state is BreakerState.CLOSED else self._open_until

    def began(self, now: float) -> None:
        """Record that a call begins now."""
        if self.state is not BreakerState.CLOSED:
            self.state = BreakerState.HALF_OPEN
            self._open_until = now + self._pause_s  # a probe that never ends does not keep the breaker open

    def ended(self, now: float, *, is_failure: bool) -> None:
        """Record that a call ended: with success, or with a timeout or an error."""
        if not is_failure:
            self.state, self._num_failures, self._pause_s = BreakerState.CLOSED, 0, FIRST_PAUSE_S
            return
        self._num_failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        elif self.state is BreakerState.OPEN or self._num_failures < FAILURES_TO_OPEN:
            return  # a call that began before the breaker opened does not lengthen the pause
        self.state, self._open_until = BreakerState.OPEN, now + self._pause_s
