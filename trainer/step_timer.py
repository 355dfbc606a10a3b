"""Times the phases of a step: each phase is added up for the step's metrics and drawn as a span on this process's lane."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from pipelinerl.observe.journal import Journal
from trainer.data.loader import RowLoader

_SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Of Linux, about the thread that reads it: nanoseconds on a core, nanoseconds for which it waited for one, and how often it got one; all 0
where the kernel does not count.
"""


class StepTimer:
    """The phases of the training loop. Entering one also tells the orchestrator what this process is doing."""

    def __init__(self, journal: Journal, *, loader: RowLoader) -> None:
        self._journal = journal
        self._loader = loader
        self._seconds: dict[str, float] = collections.defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the block's duration, and record it as a span, under `name`."""
        self._loader.busy_with = name
        start, waited_s = time.time(), _core_wait_s()
        try:
            yield
        finally:
            end = time.time()
            self._seconds[name] += end - start
            self._journal.span(self._journal.process, name, start=start, end=end)
            if name == "forward_backward" and waited_s is not None:
                self._seconds["core_wait"] += (_core_wait_s() or waited_s) - waited_s

    def finish_step(self, *, num_tokens: float) -> dict[str, float]:
        """Return the step's seconds by phase (`wait_s`, ...) and its tokens per second of work, waiting left out; start anew.

        `core_wait_s` is the part of `forward_backward_s` in which this thread could have gone on while others had its core; it is left out
        where the system does not count it.
        """
        seconds = {f"{name}_s": duration for name, duration in self._seconds.items()}
        self._seconds.clear()
        working_s = sum(seconds.values()) - seconds.get("wait_s", 0.0) - seconds.get("core_wait_s", 0.0)
        return seconds | {"tokens_per_s": num_tokens / working_s if working_s else 0.0}


def _core_wait_s() -> float | None:
    """Return the seconds for which this thread has waited for a core; None where the system does not count them."""
    try:
        _, waited, num_times = map(int, _SCHEDSTAT.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return None
    return 1e-9 * waited if num_times else None
