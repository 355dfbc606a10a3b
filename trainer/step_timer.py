"""Times the phases of a step: each phase is added up for the step's metrics and drawn as a span on this process's lane."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator

from pipelinerl.observe.journal import Journal
from trainer.data.loader import RowLoader


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
        start = time.time()
        try:
            yield
        finally:
            end = time.time()
            self._seconds[name] += end - start
            self._journal.span(self._journal.process, name, start=start, end=end)

    def finish_step(self, *, num_tokens: float) -> dict[str, float]:
        """Return the step's seconds by phase (`wait_s`, ...) and its tokens per second of work, waiting left out; start anew."""
        seconds = {f"{name}_s": duration for name, duration in self._seconds.items()}
        self._seconds.clear()
        working_s = sum(seconds.values()) - seconds.get("wait_s", 0.0)
        return seconds | {"tokens_per_s": num_tokens / working_s if working_s else 0.0}
