"""Simulated time for tests: the loop that replays run on, and threads' futures on it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools

from orchestrator.replay.clock import Deadlock, SimulatedLoop, simulate

__all__ = ["Deadlock", "SimulatedLoop", "later", "simulate"]


def later(seconds: float, error: Exception | None = None) -> concurrent.futures.Future[None]:
    """A future of the thread-pool kind that is done after some simulated seconds."""
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    finish = functools.partial(future.set_result, None) if error is None else functools.partial(future.set_exception, error)
    asyncio.get_running_loop().call_later(seconds, finish)
    return future
