"""Counts failures of the user's functions by cause: the first failure of each cause is reported at once and in full, others are counted.

Two failures have one cause where function, outcome, line and message agree. Numbers and quoted texts in the message are ignored, because a
message that names the row would otherwise be a new cause each time.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Callable, Mapping

from pipelinerl.messages import FunctionFailed, FunctionKind, Outcome
from pipelinerl.runtime.function_errors import FunctionError

AGAIN_AT = 8
"""Number of failures of one cause after which it is reported again, because a single row cannot explain them. A larger number reports later
that nothing works."""
AGAIN_AFTER_S = 1.0
"""Seconds between two further reports of one cause to the orchestrator. A longer time makes the last reports of a run late."""
MAX_CAUSES = 32
"""Number of causes of one function that are told apart; later ones are counted together."""
_VARIES = re.compile(r"\d+|'[^']*'|\\\"[^\"]*\\\"")


@dataclasses.dataclass(slots=True, kw_only=True)
class _Cause:
    error: FunctionError
    kind: FunctionKind
    rollout_id: str
    """Rollout of the first failure."""
    num: int = 0
    num_reported: int = 0
    reported_at: float = 0.0


class Failures:
    """Counts failures by function and cause, and decides when to report them. `say` prints the first of each cause into the log."""

    def __init__(
        self,
        *,
        say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[str, str, FunctionError], None] = lambda rollout_id, function, error: None,
    ) -> None:
        """Take `on_failure`, which is called with the rollout, the function and the error of every failure, also of a known cause."""
        self._on_failure = on_failure
        self._say = say
        self._clock = clock
        self._causes: dict[str, dict[tuple[str, ...], _Cause]] = {}
        """Causes by function, then by the key that tells causes apart."""

    def note(self, function: str, error: FunctionError, *, kind: FunctionKind, outcome: Outcome, rollout_id: str) -> None:
        """Record that a call of this function failed."""
        self._on_failure(rollout_id, function, error)
        causes = self._causes.setdefault(function, {})
        key = (str(outcome), error.where, _VARIES.sub("#", error.cause))
        if key not in causes:
            if len(causes) >= MAX_CAUSES:
                key, error = (str(outcome), "", "other"), FunctionError(cause=f"more than {MAX_CAUSES - 1} other causes")
            else:
                self._say(f"{function} ({kind}) failed on rollout {rollout_id}: {outcome}: {error}\n{error.traceback}".rstrip())
        cause = causes.setdefault(key, _Cause(error=error, kind=kind, rollout_id=rollout_id))
        cause.num += 1

    def news(self, *, num_calls: Mapping[str, int]) -> list[FunctionFailed]:
        """Return the reports that are due. `num_calls` is by function."""
        now = self._clock()
        return [
            self._report(function, key, cause, num_calls=num_calls.get(function, 0), now=now)
            for function, causes in self._causes.items()
            for key, cause in causes.items()
            if cause.num > cause.num_reported and _is_due(cause, now)
        ]

    def report_again(self) -> None:
        """Report every cause again, because from now on the reports go to an orchestrator that has seen none."""
        for causes in self._causes.values():
            for cause in causes.values():
                cause.num_reported = 0

    def _report(self, function: str, key: tuple[str, ...], cause: _Cause, *, num_calls: int, now: float) -> FunctionFailed:
        is_first = not cause.num_reported
        num_new, cause.num_reported, cause.reported_at = cause.num - cause.num_reported, cause.num, now
        return FunctionFailed(
            function=function,
            kind=cause.kind,
            outcome=Outcome(key[0]),
            cause=cause.error.cause,
            where=cause.error.where,
            traceback=cause.error.traceback if is_first else "",
            rollout_id=cause.rollout_id,
            num_new=num_new,
            num_calls=max(num_calls, cause.num),
        )


def _is_due(cause: _Cause, now: float) -> bool:
    """Return true for the first failure, for number `AGAIN_AT`, and then when their number has doubled or `AGAIN_AFTER_S` has passed."""
    is_many = cause.num >= max(AGAIN_AT, 2 * cause.num_reported)
    return not cause.num_reported or is_many or now - cause.reported_at >= AGAIN_AFTER_S
