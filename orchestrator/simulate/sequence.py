"""A request to a simulated engine, and the stretches of passes between which nothing begins or ends."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable

from orchestrator.simulate.cores import Job
from pipelinerl.messages import Finish


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One request, and what was written of it."""

    group_id: int
    num_context: int
    """Tokens before the first that it writes."""
    num_shared: int
    """Of these, the tokens of the prompt, which its siblings have, too."""
    length: int
    """Tokens that it writes, at least 1."""
    finish: Finish
    answer: Callable[[Sequence], None]
    num_cached: int = 0
    """Tokens of its context that this engine has computed for an earlier turn."""
    marks: tuple[int, ...] = ()
    """Numbers of tokens, rising, at which `reached` is called."""
    reached: Callable[[Sequence, int], None] = lambda sequence, mark: None
    written: int = 0
    runs: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """(version, tokens) of what was written, in order."""
    since: int = -1
    """Pass before which it began to write on; -1 while it does not."""
    kv_version: int = 0
    """Oldest version that computed a part of its cache."""
    num_pending: int = 0
    """Tokens of it that are still to be computed before it writes on."""
    is_held: bool = False
    """True while it has room in the KV cache."""
    is_over: bool = False
    serial: int = 0
    """Raised when it stops writing, so that what was planned for it no longer counts."""

    @property
    def num_tokens(self) -> int:
        """Tokens of its context and of what it had written when it last stopped."""
        return self.num_context + self.written


@dataclasses.dataclass(slots=True, kw_only=True)
class Stretch:
    """Passes of an engine between which nothing begins or ends."""

    first_s: float
    """Seconds of the first, without prompts."""
    more_s: float
    """Seconds by which each lasts longer than the one before: caches have grown."""
    prefill_s: float
    """Seconds of the first that prompts take."""
    began_s: float
    num_passes: int = 1
    job: Job = dataclasses.field(init=False)

    def seconds(self, num: int) -> float:
        """Return the seconds of work of the first `num` passes."""
        return self.prefill_s + num * self.first_s + self.more_s * num * (num - 1) / 2

    def num_over(self) -> int:
        """Return the passes that are over by now, fewer than all of them."""
        done_s = self.job.done_s() - self.prefill_s
        if done_s <= 0 or self.num_passes == 1:
            return 0
        linear = self.first_s - self.more_s / 2
        if self.more_s > 0:
            num = (math.sqrt(linear * linear + 2 * self.more_s * done_s) - linear) / self.more_s
        else:
            num = done_s / linear if linear > 0 else 0.0
        return min(self.num_passes - 1, int(num + 1e-9))


def interpolate(knots: tuple[tuple[float, float], ...], at: float) -> float:
    """Return the value at a place, linear between knots and beyond them, at least 0; with a single knot its value everywhere."""
    if len(knots) == 1:
        return knots[0][1]
    place = min(max(1, bisect.bisect_left(knots, at, key=lambda knot: knot[0])), len(knots) - 1)
    (x0, y0), (x1, y1) = knots[place - 1], knots[place]
    return max(0.0, y0 + (y1 - y0) * (at - x0) / (x1 - x0))
