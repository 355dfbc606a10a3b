"""Which engine generates a group? The one with the fewest rollouts outstanding; siblings stay together.

Siblings share their prompt, so on one engine its prefix is computed once. Balance counts rollouts, not tokens: lengths are unknown
beforehand, and the count corrects itself with every finished rollout.
"""

from __future__ import annotations

from collections.abc import Mapping


def route(outstanding: Mapping[int, int]) -> int | None:
    """The engine for the next group, given each serving engine's outstanding rollouts; ties go to the lowest id, None if none serves."""
    return min(outstanding, key=lambda engine_id: (outstanding[engine_id], engine_id), default=None)
