"""Errors in users' functions over the whole run: each cause in the journal at once, its count whenever it is told anew.

Journal line `function_error`: `function`, `function_kind` (reward, environment, prm, source, loss), `outcome`, `cause`, `where`
(`file:line`), `traceback` (of the first failure only), `rollout_id` (of the first failure), `count` (failures by this cause since the
orchestrator started), `num_calls` (calls of the function).
"""

from __future__ import annotations

import dataclasses
import sys

from pipelinerl.messages import FunctionFailed
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.function_errors import FunctionError

AGAIN_AT = 8
"""Failures of one cause after which its line is written once more: enough to see that more than a single row fails."""
AGAIN_AFTER_S = 10.0
"""Seconds between two further lines of one cause. A shorter time fills the journal; a longer one lets trackers lag."""
MAX_CAUSES = 256
"""Causes of all functions that are told apart. A scorer reports at most 32 for a function; a peer with more than this invents them."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Cause:
    first: FunctionFailed
    count: int = 0
    num_calls: int = 0
    num_written: int = 0
    written_at: float = 0.0


class FunctionErrors:
    """The failures counted by cause; `words` names the causes for the last message of a run."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._causes: dict[tuple[str, str, str, str], _Cause] = {}

    def take(self, failed: FunctionFailed) -> None:
        """Record the failure of a function, here or in a peer; the first of each cause is printed, too."""
        key = (failed.function, str(failed.outcome), failed.where, failed.cause)
        if key not in self._causes and len(self._causes) >= MAX_CAUSES:
            return
        cause = self._causes.setdefault(key, _Cause(first=failed))
        cause.count, cause.num_calls = cause.count + failed.num_new, failed.num_calls
        if cause.first is failed:
            words = f"{failed.function} ({failed.kind}) failed on rollout {failed.rollout_id}: {failed.outcome}: {error_in(failed)}"
            print(f"{words}\n{failed.traceback}".rstrip(), file=sys.stderr, flush=True)
        is_due = cause.num_written < AGAIN_AT <= cause.count or self._journal.clock() - cause.written_at >= AGAIN_AFTER_S
        if cause.first is failed or is_due:
            self._write(cause, traceback=failed.traceback if cause.first is failed else "")

    def finish(self) -> None:
        """Write the final count of every cause, at the end of the run."""
        for cause in self._causes.values():
            if cause.count > cause.num_written:
                self._write(cause)

    def _write(self, cause: _Cause, *, traceback: str = "") -> None:
        cause.num_written, cause.written_at = cause.count, self._journal.clock()
        self._journal.write(
            "function_error",
            function=cause.first.function,
            function_kind=str(cause.first.kind),
            outcome=str(cause.first.outcome),
            cause=cause.first.cause,
            where=cause.first.where,
            traceback=traceback,
            rollout_id=cause.first.rollout_id,
            count=cause.count,
            num_calls=cause.num_calls,
        )

    def words(self, *, most: int = 3) -> str:
        """Return the most frequent causes, on one line each; empty where nothing failed."""
        ranked = sorted(self._causes.values(), key=lambda cause: -cause.count)
        lines = [f"{cause.first.function} failed at least {cause.count} times: {error_in(cause.first)}" for cause in ranked[:most]]
        return "\n".join([*lines, *([f"and by {len(ranked) - most} other causes"] if len(ranked) > most else [])])


def error_in(failed: FunctionFailed) -> FunctionError:
    """Return the error that a peer reports."""
    return FunctionError(cause=failed.cause, where=failed.where, traceback=failed.traceback)
