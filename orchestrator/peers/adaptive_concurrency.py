"""How many rollouts engines get at once: so many for each engine, and where that is wanted as many as their KV caches hold
(`rules.concurrency`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from orchestrator.peers.engines import Engines
from orchestrator.rules.admission import Admission
from orchestrator.rules.concurrency import Concurrency
from pipelinerl.messages import EngineLoad
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.stage import Signal


@dataclasses.dataclass(slots=True, kw_only=True)
class RunningLimit:
    """Keeps `admission.max_running` in step with the number of engines."""

    admission: Admission
    most_in: Callable[[int], int]
    """The callback returns the largest limit with so many engines."""
    group_size: int
    credits: Signal
    journal: Journal
    _concurrency: Concurrency | None = dataclasses.field(default=None, init=False)

    def adapt_to_caches(self, engines: Engines, *, num_engines: int) -> None:
        """Lower the limit while KV caches of engines are full, and raise it again while they have room."""
        concurrency = Concurrency(most=self.admission.max_running, least=num_engines * self.group_size, group_size=self.group_size)
        self._concurrency = concurrency

        def hear(load: EngineLoad) -> None:
            if load.kv_used is None:
                return
            num_held = load.num_running + load.num_waiting
            concurrency.reported(load.engine_id, kv_used=load.kv_used, num_held=num_held, num_outstanding=len(engines.requests))
            self._set(concurrency.limit, engine_id=load.engine_id, kv_used=load.kv_used)

        engines.on_load(hear)
        engines.on_died(concurrency.lost)

    def resize(self, num_engines: int) -> None:
        """Take over another number of engines."""
        most = self.most_in(num_engines)
        if self._concurrency is not None:
            self._concurrency.resize(most=most, least=num_engines * self.group_size)
            most = self._concurrency.limit
        self._set(most, num_engines=num_engines)

    def _set(self, limit: int, **why: float) -> None:
        if limit != self.admission.max_running:
            self.admission.max_running = limit
            self.journal.write("limit", max_running=limit, **why)
            self.credits.set()
