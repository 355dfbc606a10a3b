"""Work under way, and how parts slow each other down where they share a machine's cores or its memory's bandwidth.

A job of a kind runs at 1 / (1 + sum of `slowdowns[kind, other kind]`) of its full speed, over the other jobs of its own kind that are under
way, and once over every other kind of which any is: 0.4 for ("engine", "trainer") says that a pass lasts 1.4 times as long while the
trainer works. Jobs of a kind wait for each other, as two engines on one core do, but slow down others no more than one of them. On GPUs
every part has a device of its own, and there are no slowdowns.

Speeds change only when a job begins or ends, so the end of each is computed, and moved when its speed changes.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping

from orchestrator.simulate.events import Act, Event, Events


class Cores:
    """What jobs share. `slowdowns` is by (kind, other kind)."""

    def __init__(self, events: Events, *, slowdowns: Mapping[tuple[str, str], float] | None = None) -> None:
        self.events = events
        self._slowdowns = dict(slowdowns or {})
        self._jobs: dict[Job, None] = {}
        self._num_jobs: collections.Counter[str] = collections.Counter()

    def start(self, kind: str, seconds: float, act: Act) -> Job:
        """Begin work that takes `seconds` where nothing else is under way; `act` is called at its end."""
        if self._slowdowns:
            self._num_jobs[kind] += 1
        job = Job(self, kind, seconds, act)
        if self._slowdowns:
            self._change()
            self._jobs[job] = None
        return job

    def ended(self, job: Job) -> None:
        """Note that a job has ended, or was given up."""
        if job in self._jobs:
            del self._jobs[job]
            self._num_jobs[job.kind] -= 1
            self._change()

    def speed(self, kind: str) -> float:
        """Return the speed of a job of a kind, beside the others under way."""
        if not self._slowdowns:
            return 1.0
        others = {other: num - 1 if other == kind else min(num, 1) for other, num in self._num_jobs.items()}
        return 1 / (1 + sum(num * self._slowdowns.get((kind, other), 0.0) for other, num in others.items()))

    def _change(self) -> None:
        for job in self._jobs:
            job.retime()


class Job:
    """One piece of work under way."""

    __slots__ = ("_act", "_cores", "_done_s", "_event", "_since_s", "_speed", "kind", "seconds")

    def __init__(self, cores: Cores, kind: str, seconds: float, act: Act) -> None:
        self.kind, self.seconds = kind, seconds
        self._cores, self._act = cores, act
        self._speed = cores.speed(kind)
        self._done_s, self._since_s = 0.0, cores.events.now_s
        self._event: Event = cores.events.after(seconds / self._speed, self._end)

    def done_s(self) -> float:
        """Seconds of work that are done, at full speed."""
        return self._done_s + (self._cores.events.now_s - self._since_s) * self._speed

    def resize(self, seconds: float) -> None:
        """Have it end after so many seconds of work in all."""
        self.seconds = seconds
        self._move()

    def retime(self) -> None:
        """Note that other work has begun or ended."""
        if self._cores.speed(self.kind) != self._speed:
            self._move()

    def cancel(self) -> None:
        """Give it up."""
        self._event.cancel()
        self._cores.ended(self)

    def _move(self) -> None:
        self._done_s, self._since_s = self.done_s(), self._cores.events.now_s
        self._speed = self._cores.speed(self.kind)
        self._event.cancel()
        self._event = self._cores.events.after(max(0.0, self.seconds - self._done_s) / self._speed, self._end)

    def _end(self) -> None:
        self._event.cancel()  # it refers to this job, and would keep both until a collection of garbage, a quarter of a long simulation
        self._cores.ended(self)
        self._act()
