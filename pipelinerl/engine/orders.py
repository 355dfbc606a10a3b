"""What an engine was told to fetch: an order, how orders are compared, and how far the one under way has come."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable

from pipelinerl.messages import StageWeights

Stager = Callable[[StageWeights], "concurrent.futures.Future[None]"]
"""Starts `Engine.stage` somewhere that does not hold up the loop."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Staging:
    """An order that is being carried out."""

    order: StageWeights
    future: concurrent.futures.Future[None]
    started_at: float
    stage_s: float | None = None
    """Set once it is staged and acknowledged."""


def age_of(order: StageWeights) -> tuple[int, int]:
    """The pair (rollback epoch, version), by which orders are compared."""
    return order.rollback_epoch, order.version
