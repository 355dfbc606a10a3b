"""PassProfile fits how long an engine's forward pass takes to what engines have reported: the seconds, by sequences and their contexts.

Between two reports an engine has run some passes, which sampled some tokens; each token belongs to a sequence with a context, the tokens
that the pass reads for it. Least squares, no coefficient below 0:

    seconds in passes = a * passes + b * tokens + c * tokens of context, summed over the sequences of each pass

so that a pass for n sequences of m tokens takes a + b n + c n m. Where engines always run as many sequences, a and b cannot be told apart;
then the fit is right for as many and a guess for others. What engines of more or fewer ranks would take is a guess (`DOUBLED`) until the
run has had them.

The simulator fits the engines of a recorded run with the same `least_squares` (`orchestrator.simulate.speeds`).
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics

import numpy as np
import numpy.typing as npt

from pipelinerl.messages import EngineLoad

KEPT = 1024
"""Reports of all engines that a fit looks back on. Fewer forget contexts that come again; more follow an engine that changed too late."""
LEAST_REPORTS = 8
"""Reports without which nothing is fitted: three coefficients want some more."""
LEAST_PASSES = 3
"""Passes without which a report says little: the time of the first of them may be that of one long prompt."""
LEAST_KV = 0.05
"""Part of a KV cache in use from which on it says how many tokens the whole of it holds."""

DOUBLED = 1.6
"""Times by which a pass is taken to be quicker with twice the ranks, before it was seen: the ranks share every matrix, and wait for each
other twice a layer. A larger value tries wider engines sooner; with 1 nobody finds out what they do."""

Numbers = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PassSeconds:
    """Seconds of a pass: a + b n + c n m for n sequences, each of m tokens."""

    a: float
    b: float
    c: float

    def __call__(self, num: float, context: float) -> float:
        """Return the seconds of one pass."""
        return self.a + self.b * num + self.c * num * context

    def over(self, times: float) -> PassSeconds:
        """Return a guess at the same with `times` as many ranks in an engine."""
        part = DOUBLED ** -math.log2(times)
        return PassSeconds(a=self.a * part, b=self.b * part, c=self.c * part)


class PassProfile:
    """What engines of one kind have reported, the newest of it."""

    def __init__(self) -> None:
        self._rows: collections.deque[tuple[float, float, float, float]] = collections.deque(maxlen=KEPT)
        """Seconds, passes, tokens, tokens of context."""
        self._rooms: collections.deque[float] = collections.deque(maxlen=KEPT)
        """Tokens that a whole KV cache holds, as each report says."""

    def reported(self, before: EngineLoad, after: EngineLoad) -> None:
        """Take two reports of one engine, the one right after the other."""
        passes, context = after.num_steps - before.num_steps, after.num_context_tokens - before.num_context_tokens
        if passes < LEAST_PASSES:
            return
        self._rows.append((after.busy_s - before.busy_s, passes, after.num_tokens - before.num_tokens, context))
        if after.kv_used is not None and after.kv_used > LEAST_KV and context:
            self._rooms.append(context / passes / after.kv_used)

    def fit(self) -> PassSeconds | None:
        """Return the seconds of a pass; None where too little was reported, or no time has passed in passes."""
        if len(self._rows) < LEAST_REPORTS:
            return None
        table = np.array(self._rows)
        a, b, c = least_squares(table[:, 1:], table[:, 0]).tolist()
        return PassSeconds(a=a, b=b, c=c) if a + b + c > 0 else None

    @property
    def room(self) -> float:
        """Tokens that an engine's KV cache holds, those that sequences share counted for each of them; infinite where nobody says."""
        return statistics.median(self._rooms) if self._rooms else float("inf")


def least_squares(parts: Numbers, seconds: Numbers) -> Numbers:
    """Return the coefficients [columns] of `parts` [rows, columns] with the least squared error to `seconds` [rows], none below 0.

    Columns come in one by one, the one that lowers the error soonest first, and leave where they would fall below 0 (Lawson and Hanson,
    Solving Least Squares Problems, 1974, chapter 23). Of columns that tell the same, one is used.
    """
    norms = np.linalg.norm(parts, axis=0)
    columns, found, is_in = parts / np.where(norms > 0, norms, 1.0), np.zeros(parts.shape[1]), np.zeros(parts.shape[1], np.bool_)
    least = 1e-9 * float(np.linalg.norm(seconds))
    for _ in range(3 * len(found)):  # more are of a column that comes and goes by its last digits
        slopes = np.where(is_in, 0.0, columns.T @ (seconds - columns @ found))
        if slopes.max() <= least:
            break
        is_in[slopes.argmax()] = True
        while True:
            best = np.zeros(len(found))
            best[is_in], *_ = np.linalg.lstsq(columns[:, is_in], seconds, rcond=1e-9)
            falls = is_in & (best <= 0)
            if not falls.any():
                break
            part = (found[falls] / (found[falls] - best[falls])).min()
            found = found + part * (best - found)
            is_in &= found > 1e-12 * found.max()
        found = best
    return found / np.where(norms > 0, norms, 1.0)
