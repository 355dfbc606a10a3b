"""This rule decides which running sequences compute their KV cache again at a swap.

A cache that is kept was computed in part by older policies: tokens are then sampled from a mixture. There are two limits, both off by
default, and each engine applies both to each sequence:

- `max_staleness`: versions between the new policy and the oldest part of its cache;
- `max_mean_staleness`: versions that its cache is behind the new policy, as a mean over the cache's tokens. A sequence with a long old part
  is beyond it, one that has mostly been written since is not.

`max_mean_staleness` follows from a bound on the KL between the distribution that a sequence is sampled from and the policy. Measuring it
for one sequence would mean computing its cache twice, so it is predicted: between policies near each other it is quadratic in their
distance, so KL = c lag^2. The trainer measures c: each step's KL, summed over the tokens of the very version being trained whose sequences
lived through a swap, over the squared lags of the same tokens (`squared_lags`). So a sequence's cache is computed anew where its lag
exceeds sqrt(max_kl / c).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pipelinerl.messages import UNSAMPLED, Trajectory

MEMORY = 0.9
"""The factor on the weight of earlier steps after each further one. A larger value follows a changing learning rate later; a smaller one
follows noise.
"""
DOUBT = 0.98
"""The factor on the measured KL after a step that shows nothing, for example where every cache is computed anew: in time one is kept, and
measured.
"""
MIN_TOKENS = 200
"""The fewest tokens behind a prediction; fewer are noise."""


class KvPolicy:
    """The limits in force. A `max_staleness` of None allows any age; a `max_kl` of None sets no limit on the lag."""

    def __init__(self, *, max_staleness: int | None = None, max_kl: float | None = None) -> None:
        self.max_staleness = max_staleness
        self._max_kl = max_kl
        self._kl = self._square = self._num_tokens = 0.0
        """Sums over tokens of old caches: nats, squared lags, tokens."""

    @property
    def max_mean_staleness(self) -> float | None:
        """The mean lag, in versions, beyond which a sequence's cache is computed anew; None while the lag has no limit."""
        if self._max_kl is None or self._num_tokens < MIN_TOKENS or self._kl <= 0.0:
            return None
        return float(np.sqrt(self._max_kl * self._square / self._kl))

    def trained(self, step: int, trajectories: Iterable[Trajectory], metrics: Mapping[str, float]) -> None:
        """Note a step's trajectories, and the trainer's metrics of it."""
        if self._max_kl is None:
            return
        lags = [squared_lags_of(trajectory, trained=step) for trajectory in trajectories]
        # Less the share that is due to arithmetic.
        excess = metrics.get("mismatch_kl_stale_kv", 0.0) - metrics.get("mismatch_kl_on_policy", 0.0)
        kl = max(0.0, excess) * metrics.get("tokens_stale_kv", 0.0)
        self.measured(kl=kl, square=sum(square for square, _ in lags), num_tokens=sum(num for _, num in lags))

    def measured(self, *, kl: float, square: float, num_tokens: int) -> None:
        """Note a step's tokens that were sampled with an old cache: the sums of their KL (nats, at least 0) and squared lags."""
        if not num_tokens:
            self._kl *= DOUBT
            return
        self._kl = MEMORY * self._kl + kl
        self._square = MEMORY * self._square + square
        self._num_tokens = MEMORY * self._num_tokens + num_tokens


def squared_lags(versions: npt.NDArray[np.int32], *, num_prompt: int, recomputed: Sequence[int], trained: int) -> tuple[float, int]:
    """Return (sum, count) of the squared lags, where not 0, of the tokens that version `trained` sampled.

    `versions` [T] belong to the sampled tokens, after a prompt of `num_prompt` tokens; before each of the tokens `recomputed` the cache was
    computed anew. A token's part of the cache counts under the version that sampled it, the prompt's part under that of the first token.
    """
    first, end = (int(np.searchsorted(versions, trained, side=side)) for side in ("left", "right"))
    start = max((place for place in recomputed if place <= first), default=0)
    if first == end or start == first:
        return 0.0, 0
    behind = (num_prompt + start) * (trained - int(versions[start])) + int((trained - versions[start:first]).sum())
    lags = behind / (num_prompt + np.arange(first, end))
    return float(np.square(lags).sum()), end - first


def squared_lags_of(trajectory: Trajectory, *, trained: int) -> tuple[float, int]:
    """Return `squared_lags` summed over the turns of a rollout. The cache before a turn is computed anew where the version has changed."""
    num_prompt = len(trajectory.prompt.token_ids)
    found = [
        squared_lags(
            trajectory.versions[start:end],
            num_prompt=num_before,
            recomputed=[at for place in trajectory.recomputed if (at := place + num_prompt - start) >= 0],
            trained=trained,
        )
        for start, end, num_before in _turns_of(trajectory)
    ]
    return sum(square for square, _ in found), sum(count for _, count in found)


def _turns_of(trajectory: Trajectory) -> Iterable[tuple[int, int, int]]:
    """Yield (start, end, number of tokens before it) of each stretch that was sampled at once."""
    if trajectory.nodes is None:
        for start, end in np.flatnonzero(np.diff(trajectory.versions != UNSAMPLED, prepend=False, append=False)).reshape(-1, 2).tolist():
            yield start, end, start
        return
    start, lengths = 0, list[int]()
    """Tokens of the path to each node."""
    for parent, num in zip(trajectory.nodes.parents.tolist(), trajectory.nodes.lengths.tolist(), strict=True):
        num_before = lengths[parent] if parent >= 0 else 0
        if trajectory.loss_mask[start]:
            yield start, start + num, num_before
        lengths.append(num_before + num)
        start += num
