"""A policy on its way into a simulated engine, and what its swap came to."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True, kw_only=True)
class Staging:
    """A policy on its way into the engine."""

    version: int
    when_idle: bool
    kv_max_staleness: int | None
    began_s: float
    stage_s: float | None = None
    """Set once it is staged."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A change of version."""

    version: int
    pause_s: float
    stage_s: float
    num_running: int
    num_recomputed_tokens: int
