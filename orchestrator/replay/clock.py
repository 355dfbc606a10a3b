"""An asyncio event loop on simulated time: waiting costs nothing, and the same program takes the same steps every time.

`time()` jumps to the next timer whenever nothing is ready. A program in which every task waits and no timer is set is a deadlock, and
raises at once. Work handed to a thread runs inline, so that no real thread can reorder anything.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class Deadlock(Exception):
    """Every task waits, and no timer would wake one."""


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self))
        # A timer is due when it is less than this ahead. With the real clock's nanosecond, a number as large as a year in seconds would
        # not change by adding it: the timer that was jumped to would never be due.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()
        future.set_result(func(*args))
        return future


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock(f"at {self._loop.time():.3f} s everybody waits and no timer is set")
        if timeout > 0:
            self._loop.jump(timeout)
        return []


def simulate(program: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end on simulated time."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(program)
