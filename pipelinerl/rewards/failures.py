"""Which functions fail, by cause: the first failure of each cause is told at once and whole, a million more are counted.

Two failures have one cause where function, outcome, line and words agree, numbers and quoted texts in the words aside: a message that
names the row would else be a new cause each time.
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
"""Failures of one cause after which it is told once more: enough to see that it is no single row. Larger says later that nothing works."""
AGAIN_AFTER_S = 1.0
"""Between two further accounts of one cause to the orchestrator. Longer lets the last words of a run lag behind."""
MAX_CAUSES = 32
"""Of one function that are told apart; those that come later are counted together."""
_VARIES = re.compile(r"\d+|'[^']*'|\\\"[^\"]*\\\"")


@dataclasses.dataclass(slots=True, kw_only=True)
class _Cause:
    error: FunctionError
    kind: FunctionKind
    rollout_id: str
    """Of the first failure."""
    num: int = 0
    num_told: int = 0
    told_at: float = 0.0


class Failures:
    """Counts failures by function and cause, and says when to tell of them. `say` prints the first of each for whoever reads the log."""

    def __init__(
        self,
        *,
        say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[str, str, FunctionError], None] = lambda rollout_id, function, error: None,
    ) -> None:
        """`on_failure` is told of every failure, also where its cause is known: the rollout, the function, why."""
        self._on_failure = on_failure
        self._say = say
        self._clock = clock
        self._causes: dict[str, dict[tuple[str, ...], _Cause]] = {}
        """By function, then by what tells causes apart."""

    def note(self, function: str, error: FunctionError, *, kind: FunctionKind, outcome: Outcome, rollout_id: str) -> None:
        """A call of this function failed."""
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

    def news(self, *, num_calls: Mapping[str, int], is_last: bool = False) -> list[FunctionFailed]:
        """What is due to be told; `num_calls` by function, `is_last`: all that was not told yet."""
        now = self._clock()
        return [
            self._tell(function, key, cause, num_calls=num_calls.get(function, 0), now=now)
            for function, causes in self._causes.items()
            for key, cause in causes.items()
            if cause.num > cause.num_told and (is_last or _is_due(cause, now))
        ]

    def tell_anew(self) -> None:
        """Another is told from now on, who knows of nothing."""
        for causes in self._causes.values():
            for cause in causes.values():
                cause.num_told = 0

    def _tell(self, function: str, key: tuple[str, ...], cause: _Cause, *, num_calls: int, now: float) -> FunctionFailed:
        is_first = not cause.num_told
        num_new, cause.num_told, cause.told_at = cause.num - cause.num_told, cause.num, now
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
    """The first, the eighth, then whenever they have become twice as many or `AGAIN_AFTER_S` has passed."""
    is_many = cause.num >= max(AGAIN_AT, 2 * cause.num_told)
    return not cause.num_told or is_many or now - cause.told_at >= AGAIN_AFTER_S
