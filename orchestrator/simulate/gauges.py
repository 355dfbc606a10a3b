"""The gauges of a simulated moment, in the fields of a live run's status line."""

from __future__ import annotations

import dataclasses
from typing import Any

from orchestrator.rules.dispatch import gauges_of
from orchestrator.simulate.batching import Batching
from orchestrator.simulate.books import Books
from orchestrator.simulate.generation import Generation
from orchestrator.simulate.scorers import Slots
from orchestrator.simulate.scoring import Scoring
from orchestrator.simulate.trainer import Trainer
from pipelinerl.config import Config


def gauges(
    config: Config,
    *,
    trainer: Trainer,
    generation: Generation,
    scoring: Scoring,
    batching: Batching,
    slots: Slots,
    books: Books,
    num_generated: int,
) -> dict[str, Any]:
    """Return what `orchestrator.observe.status` writes of a live run."""
    admission, waits = generation.admission, generation.waits
    return {
        "version": admission.version,
        "step": trainer.step,
        "num_steps": config.trainer.steps,
        "groups_running": admission.running,
        "groups_accepted": admission.accepted,
        "max_running": admission.max_running,
        "rollouts": dataclasses.asdict(books.counts()),
        "reasons": dict(books.reasons),
        "generated_tokens": num_generated,
        "engines": [engine.gauges() for engine in generation.engines if engine.is_alive],
        "members": [],
        "scorers": [{"scorer_id": 0, "num_running": slots.num_running, "num_scored": slots.num_done, "busy_s": slots.busy_s}],
        "prm": None,
        "environment": None,
        "gateway": None,
        "dispatch": gauges_of(generation.dispatch, generation.group_cut),
        "queues": {
            "trajectories": _queue(scoring.num_waiting),
            "scored": _queue(batching.num_waiting, num_bytes=scoring.claimed_bytes, bound=config.pipeline.queue_bytes),
        },
        "refused": {},
        "waits": waits.under_way(),
        "waited_s": waits.all_waited_s(),
        "memory_bytes": None,
    }


def _queue(items: int, *, num_bytes: int = 0, bound: int = 0) -> dict[str, int]:
    return {"items": items, "bytes": num_bytes, "bound_bytes": bound, "num_items_total": 0}
