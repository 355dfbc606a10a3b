"""Who waits for what, in simulated seconds: the figures that a live run's watch keeps (`pipelinerl.runtime.watch`)."""

from __future__ import annotations

from orchestrator.simulate.events import Events


class Waits:
    """The waits of each stage, one at a time."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._under_way: dict[str, tuple[str, float]] = {}
        self._seconds: dict[str, float] = {}

    def now(self, stage: str, what: str | None) -> None:
        """Note what a stage waits for from now on; None: for nothing."""
        before = self._under_way.get(stage)
        if (before and before[0]) == what:
            return
        if before is not None:
            key = f"{stage}: {before[0]}"
            self._seconds[key] = self._seconds.get(key, 0.0) + self._events.now_s - before[1]
            del self._under_way[stage]
        if what is not None:
            self._under_way[stage] = (what, self._events.now_s)

    def under_way(self) -> list[dict[str, str | float]]:
        """Return the waits of this moment, longest first."""
        found = sorted(self._under_way.items(), key=lambda item: item[1][1])
        return [{"stage": stage, "what": what, "seconds": self._events.now_s - since} for stage, (what, since) in found]

    def all_waited_s(self) -> dict[str, float]:
        """Return the seconds waited so far, by `stage: what`."""
        seconds = dict(self._seconds)
        for stage, (what, since) in self._under_way.items():
            key = f"{stage}: {what}"
            seconds[key] = seconds.get(key, 0.0) + self._events.now_s - since
        return seconds
