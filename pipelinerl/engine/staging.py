"""The thread in which an engine stages policies, out of the way of its forward passes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Iterator

from pipelinerl.engine.base import Engine
from pipelinerl.messages import StageWeights
from pipelinerl.weights.throttle import limit_cpu

NICENESS = 17
"""Niceness by which staging yields to decoding where both want the same core: at 17 the scheduler gives it 23 shares to 1,024, 2 %, and
measured it takes twice that. On a free core it makes no difference. Higher delays a policy for longer on a machine without one; lower takes
more from decoding.
"""
SHARE = 0.03
"""Fraction of the core for staging a policy, where decoding has only that one. Higher stages sooner and takes more from decoding. 0.02 was
no better for decoding, and took half as long again.
"""


class StagingThread:
    """Runs `Engine.stage`, one order at a time. Use as a context; it is left once the staging under way has ended."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._decoding_rests = threading.Event()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="stage", initializer=yield_to_decoding)

    def __call__(self, order: StageWeights) -> concurrent.futures.Future[None]:
        return self._thread.submit(self._stage, order)

    def __enter__(self) -> StagingThread:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()

    @contextlib.contextmanager
    def while_decoding_rests(self) -> Iterator[None]:
        """Inside it no sequence runs: staging has the core for itself."""
        self._decoding_rests.set()
        try:
            yield
        finally:
            self._decoding_rests.clear()

    def _stage(self, order: StageWeights) -> None:
        with beside_decoding(rests=self._decoding_rests):
            self._engine.stage(order)


def beside_decoding(*, rests: threading.Event | None = None) -> contextlib.AbstractContextManager[None]:
    """Limit one staging to its share of the core where decoding has no other core than this thread's, except while decoding `rests`."""
    return limit_cpu(SHARE, lifted=rests) if len(os.sched_getaffinity(0)) == 1 else contextlib.nullcontext()


def yield_to_decoding() -> None:
    """Lower this thread's priority."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # Linux keeps a niceness for each thread
