"""A reward model as the orchestrator knows it: processes inside the scorer, which says once a second how they are.

`rules.membership` says which processes the model has. The scorer reads that in the run's folder and makes it so
(`rewards.pool.processes`): here it is only heard what came of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterator

from orchestrator.rules.membership import Membership
from pipelinerl.messages import RewardProcess, ScorerLoad
from pipelinerl.runtime.membership import State
from pipelinerl.runtime.stage import Signal


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ModelProcess:
    """One process of the model that has loaded it."""

    engine_id: int
    """Its number, from 0."""
    said: RewardProcess
    """What its scorer has said of it last."""
    leaves_for: str = ""
    """Why it is to leave; empty where it stays."""

    @property
    def num_outstanding(self) -> int:
        """Completions that it has."""
        return self.said.num_held

    @property
    def is_busy(self) -> bool:
        """True until it has ended all that it had. Before its scorer has closed it, it may be given more."""
        return self.said.num_held > 0 or not self.said.is_closed


class RewardModel:
    """The model's processes. Whoever counts on them hears by `changed` that one has come or gone."""

    def __init__(self, *, membership: Membership, credits: Signal) -> None:
        """`credits` is set with every answer, which those who wait for a process to end what it has wait for."""
        self.membership = membership
        self.changed = Signal()
        """Set when a process has loaded the model, or is gone."""
        self._credits = credits
        self._processes: dict[int, ModelProcess] = {}
        self._busy_s = self._gone_s = 0.0
        """Of the scorer that is there; of those before it."""
        self._heard_s: float | None = None

    def __iter__(self) -> Iterator[ModelProcess]:
        return iter(self._processes.values())

    def find(self, engine_id: int) -> ModelProcess | None:
        """Return the process of this number; None while it loads, or is not there."""
        return self._processes.get(engine_id)

    def serves(self, engine: object) -> bool:
        """Return whether the process is there, and is the one that it was."""
        return any(engine is one for one in self)

    def busy_s(self) -> float:
        """Return the seconds in which processes have scored, summed over them, those of scorers that are gone included."""
        return self._gone_s + self._busy_s

    def silence_s(self, now_s: float) -> float:
        """Return for how long its scorer has said nothing of it; infinite before its first word."""
        return math.inf if self._heard_s is None else now_s - self._heard_s

    def leave(self, engine_id: int, reason: str) -> None:
        """Note that a process is to leave; with an empty reason, that it stays. Its scorer reads that in the run's folder."""
        if (process := self.find(engine_id)) is not None:
            process.leaves_for = reason

    def dismiss(self, engine_id: int, reason: str) -> None:
        """Count on a process no more: its scorer ends it, and asks others for what it has."""
        self._processes.pop(engine_id, None)
        self.changed.set()

    def lost(self, engine_id: int, reason: str) -> None:
        """Note that a process will not serve, though nobody asked it to leave."""
        self.membership.lost(engine_id, reason)
        self.dismiss(engine_id, reason)

    def heard(self, load: ScorerLoad) -> None:
        """Take what the scorer says of the model. What it says of a process that another request brought is old."""
        said = load.models.get(self.membership.kind)
        if said is None:
            return
        self._heard_s = asyncio.get_running_loop().time()
        if said.busy_s < self._busy_s:  # another scorer counts anew
            self._gone_s += self._busy_s
        self._busy_s = said.busy_s
        for member in self.membership.record().members:
            one = said.processes.get(member.engine_id)
            self._take(member.engine_id, one if one is not None and one.brought_by == str(member.request_id) else None)
        self._credits.set()

    def _take(self, number: int, said: RewardProcess | None) -> None:
        """Take what is said of a process; None where nothing is, as it is not there."""
        state, known = self.membership.state(number), self.find(number)
        if said is not None and said.failed:
            if state in (State.JOINING, State.LIVE, State.DRAINING):
                self.lost(number, said.failed)
        elif said is None or not said.is_loaded:
            if known is not None:
                del self._processes[number]
                self.membership.ended(number)
                self.changed.set()
        elif state is State.JOINING:
            self._processes[number] = ModelProcess(engine_id=number, said=said)
            self.membership.joined(number)
            self.changed.set()
        elif known is not None:
            known.said = said
