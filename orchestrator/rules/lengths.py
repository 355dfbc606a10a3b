"""Predicts how long rollouts will be, from those that are finished: siblings that have ended say most, all others the rest.

The prediction for a group whose n ended siblings have the mean x, beside recent rollouts of the mean m, is

    m + (x - m) n / (n + k)        k = variance within groups / variance between their means

the linear prediction with the least squared error (Bühlmann 1967, credibility; k is estimated from whole groups by analysis of variance).
Where siblings are alike, k is small and a single one that has ended, a probe, tells the length of the others; where prompts say nothing of
lengths, k is large and every group is expected to be as long as any.
"""

from __future__ import annotations

import collections
import statistics

import numpy as np

WINDOW = 1024
"""Rollouts behind the mean. A larger value follows a policy whose answers grow later; a smaller one follows noise."""
NUM_GROUPS = 64
"""Whole groups behind k."""
MIN_GROUPS = 8
"""Whole groups before k is estimated; fewer tell nothing of two variances, and k is 1 until then."""
MAX_OPEN = 4096
"""Groups of which ended siblings are remembered; siblings that are lost or stopped leave theirs open for ever."""
REFRESH = 32
"""Rollouts after which the lengths are sorted anew: no prediction hangs on the last few."""


class Lengths:
    """The lengths of finished rollouts, in tokens, and what they say of the others."""

    def __init__(self, *, group_size: int, max_tokens: int) -> None:
        """Expect `max_tokens`, the longest that a rollout may be, while none is finished."""
        self.max_tokens = max_tokens
        self._group_size = group_size
        self._ended: dict[int, list[int]] = {}
        """Lengths of the ended siblings of each group that is not whole."""
        self._recent: collections.deque[int] = collections.deque(maxlen=WINDOW)
        self._sum = 0
        self._groups: collections.deque[tuple[float, float]] = collections.deque(maxlen=NUM_GROUPS)
        """(mean, variance) of whole groups."""
        self._k: float | None = 1.0
        self._sorted = np.zeros(0)
        self._num_since = REFRESH

    def finished(self, group_id: int, num_tokens: int) -> None:
        """Note the length of a rollout that has ended by itself or at its limit."""
        if len(self._recent) == WINDOW:
            self._sum -= self._recent[0]
        self._recent.append(num_tokens)
        self._sum += num_tokens
        self._num_since += 1
        ended = self._ended.setdefault(group_id, [])
        if len(self._ended) > MAX_OPEN:
            del self._ended[next(iter(self._ended))]
        ended.append(num_tokens)
        if len(ended) == self._group_size:
            del self._ended[group_id]
            if self._group_size > 1:
                self._groups.append((statistics.fmean(ended), statistics.variance(ended)))
                self._k = None

    def expected(self, group_id: int, *, written: int = 0) -> float:
        """Return the expected length of a rollout of a group that has written so many tokens and goes on."""
        if not self._recent:
            return float(self.max_tokens)
        expected = self._sum / len(self._recent)
        if (ended := self._ended.get(group_id)) is not None:
            expected += (statistics.fmean(ended) - expected) * len(ended) / (len(ended) + self.k)
        return min(self.max_tokens, expected if expected > written else self._mean_above(written))

    @property
    def k(self) -> float:
        """The number of siblings whose mean weighs as much as that of all recent rollouts."""
        if self._k is None:
            self._k = 1.0 if len(self._groups) < MIN_GROUPS else _ratio_of_variances(self._groups, self._group_size)
        return self._k

    def _mean_above(self, written: int) -> float:
        """Return the mean length of recent rollouts that were longer than this; twice as long where none was."""
        if self._num_since >= REFRESH:
            self._sorted, self._num_since = np.sort(np.array(self._recent, np.float64)), 0
        longer = self._sorted[np.searchsorted(self._sorted, written, side="right") :]
        return float(longer.mean()) if len(longer) else 2.0 * written


def kv_token_passes(num_prompt: float, num_tokens: float) -> float:
    """Return the tokens that a rollout holds in a KV cache, summed over the passes that write it: P L + L^2 / 2."""
    return num_prompt * num_tokens + num_tokens * num_tokens / 2


def peak_tokens(held: list[tuple[float, float]]) -> float:
    """Return the most tokens that a KV cache will hold, of (tokens held now, tokens still to come) of each rollout, if nothing is added.

    All grow by one token a pass, and one with r to come leaves after r passes, so the peak is just before one of them leaves: the largest,
    over rollouts in falling order of r, of what it and those before it hold now plus r for each of them (arXiv 2507.10150).
    """
    peak = total = 0.0
    for number, (now, to_come) in enumerate(sorted(held, key=lambda pair: -pair[1]), 1):
        total += now
        peak = max(peak, total + number * to_come)
    return peak


def _ratio_of_variances(groups: collections.deque[tuple[float, float]], group_size: int) -> float:
    within = statistics.fmean(variance for _, variance in groups)
    between = statistics.variance(mean for mean, _ in groups) - within / group_size
    if within == 0.0:
        return 0.0
    return within / between if between > 0 else float("inf")
