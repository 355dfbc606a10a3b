"""The engines' KV caches decide how many rollouts engines get, see `rules.concurrency`."""

from __future__ import annotations

from orchestrator.peers.engines import Engines
from orchestrator.rules.admission import Admission
from orchestrator.rules.concurrency import Concurrency
from pipelinerl.messages import EngineLoad
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.stage import Signal


def adapt_concurrency(
    admission: Admission, *, engines: Engines, num_engines: int, group_size: int, credits: Signal, journal: Journal
) -> None:
    """Adapt `admission.max_running` to the engines' reports of their KV caches."""
    concurrency = Concurrency(most=admission.max_running, least=num_engines * group_size, group_size=group_size)

    def hear(load: EngineLoad) -> None:
        if load.kv_used is None:
            return
        num_held = load.num_running + load.num_waiting
        concurrency.reported(load.engine_id, kv_used=load.kv_used, num_held=num_held, num_outstanding=len(engines.requests))
        if concurrency.limit != admission.max_running:
            admission.max_running = concurrency.limit
            journal.write("limit", max_running=concurrency.limit, engine_id=load.engine_id, kv_used=load.kv_used)
            credits.set()

    engines.on_load(hear)
    engines.on_died(concurrency.lost)
