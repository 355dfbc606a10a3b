"""Calls that are served by slots, in the order in which they came: rewards and environments one by one, those of a process reward model
in batches.
"""

from __future__ import annotations

import collections
import dataclasses
import math

from orchestrator.simulate.cores import Cores
from orchestrator.simulate.events import Act
from orchestrator.simulate.rollouts import Rollout
from orchestrator.simulate.world import ScoringWorld
from pipelinerl.config import Config

Call = tuple[float, Act]
"""Seconds, and what is called at its end."""


class Slots:
    """So many calls at once; the others wait."""

    def __init__(self, cores: Cores, *, kind: str, num_slots: int) -> None:
        """`kind` is that of its calls among the jobs that share `cores`."""
        self.num_running = 0
        self.num_done = 0
        self.busy_s = 0.0
        """Seconds of calls that ended, summed over slots."""
        self.slowness = 1.0
        """Factor on the seconds of calls that begin now."""
        self.on_done: Act = lambda: None
        """Called as each call ends."""
        self._cores, self._kind = cores, kind
        self.num_slots = num_slots
        """It may change; calls under way go on."""
        self._waiting: collections.deque[Call] = collections.deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def call(self, seconds: float, act: Act) -> None:
        """Ask for a call of so many seconds; `act` is called at its end."""
        self._waiting.append((seconds, act))
        self._begin()

    def _begin(self) -> None:
        num = self._num_at_once()
        while self._waiting and self.num_running < self.num_slots:
            calls = [self._waiting.popleft() for _ in range(min(num, len(self._waiting)))]
            self.num_running += 1
            lasts_s = self._seconds(calls) * self.slowness
            self._cores.start(self._kind, lasts_s, lambda lasts_s=lasts_s, calls=calls: self._end(lasts_s, calls))

    def _num_at_once(self) -> int:
        """Return how many of the calls that wait a free slot serves at once."""
        return 1

    def _seconds(self, calls: list[Call]) -> float:
        return sum(seconds for seconds, _ in calls)

    def _end(self, lasts_s: float, calls: list[Call]) -> None:
        self.num_running -= 1
        self.num_done += len(calls)
        self.busy_s += lasts_s
        self._begin()
        for _, act in calls:
            self.on_done()
            act()


class Batches(Slots):
    """Each slot serves its part of what waits at once, in `batch_s` and the seconds of these calls."""

    def __init__(self, cores: Cores, *, kind: str, num_slots: int, batch_s: float) -> None:
        super().__init__(cores, kind=kind, num_slots=num_slots)
        self._batch_s = batch_s
        self._is_due = False

    def call(self, seconds: float, act: Act) -> None:
        """Ask for a call; what is asked for at the same moment is one batch."""
        self._waiting.append((seconds, act))
        if not self._is_due:
            self._is_due = True
            self._cores.events.after(0.0, self._due)

    def _due(self) -> None:
        self._is_due = False
        self._begin()

    def _num_at_once(self) -> int:
        return math.ceil(len(self._waiting) / self.num_slots)

    def _seconds(self, calls: list[Call]) -> float:
        return self._batch_s + super()._seconds(calls)


def prm_of(config: Config, world: ScoringWorld, cores: Cores) -> Batches | None:
    """Return a run's process reward models, which take turns; None where it has none."""
    return Batches(cores, kind="prm", num_slots=config.prm.count, batch_s=world.prm_batch_s) if config.prm.is_used else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Where the steps of completions end. The first ends anywhere, since their text says where steps do."""

    num_tokens: int
    """Tokens from one end to the next."""
    chunk_tokens: int
    """Tokens between two reports of an engine on a sequence: the end of a step is known with the next one."""

    def ends(self, rollout: Rollout, first: int, last: int) -> list[int]:
        """Return the tokens, more than `first` and fewer than `last`, after which a step of a rollout is known to have ended."""
        begin = max(1, math.ceil(float(rollout.draws.luck[rollout.sibling, 0]) * self.num_tokens))
        reports = (math.ceil(end / self.chunk_tokens) * self.chunk_tokens for end in range(begin, last, self.num_tokens))
        return [end for end in reports if first < end < last]


def steps_of(config: Config, world: ScoringWorld) -> Steps | None:
    """Return where steps end that a run's process reward models score; None where it has none."""
    if not config.prm.is_used:
        return None
    chunk_tokens = config.prm.chunk_tokens
    return Steps(num_tokens=max(chunk_tokens, round(world.prm_step_tokens)), chunk_tokens=chunk_tokens)
