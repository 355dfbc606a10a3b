"""Recorded engines and policies: they say what they said, when they said it, to the stages of a harness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

from orchestrator.replay.events import Event, read_events
from orchestrator.replay.harness import Harness
from orchestrator.stages.weight_sync import WeightSync
from pipelinerl.errors import LedgerError
from pipelinerl.messages import EngineReady, PolicyPublished, Starting, TrainerReady, WeightsCommitted, WeightsRefused, WeightsStaged
from pipelinerl.runtime.membership import State

ENGINE_KINDS = frozenset({"joined", "left", "staged", "swap", "refused", "policy", "trainer", "pin", "member"})
"""Journal lines that weight sync hears."""
_REST_S = 1.0
"""Seconds that the stages have after the last event."""
_SAID_BY_ENGINES = {"staged": WeightsStaged, "swap": WeightsCommitted, "refused": WeightsRefused}


def read_policies(run_folder: Path, *, kinds: Iterable[str] = ()) -> list[Event]:
    """Return the events of engines and policies, and those of `kinds`. Raises `LedgerError` where no policy is among them."""
    events = read_events(run_folder, kinds=ENGINE_KINDS | {*kinds})
    if not any(event.kind == "policy" for event in events):
        raise LedgerError(f"{run_folder} has no published policy, so there is nothing to synchronise or to generate with")
    return events


async def repeat(events: Iterable[Event], *, hear: Callable[[Event], None]) -> None:
    """Have every event heard at its time, and wait until the stages have answered the last."""
    loop = asyncio.get_running_loop()
    end_s = 0.0
    for event in events:
        loop.call_at(event.t, hear, event)
        end_s = event.t
    await asyncio.sleep(end_s + _REST_S - loop.time())


def say(harness: Harness, event: Event) -> None:
    """Repeat one event of engines or policies."""
    fields = {name: value for name, value in event.fields.items() if name not in ("t", "kind", "process")}
    peer, published = f"engine-{fields.get('engine_id')}", harness.stage(WeightSync).published
    process_id = int(1e6 * event.t) + 1  # each announcement is another process
    match event.kind:
        case "trainer":
            published.put_now(TrainerReady(replica=0, num_replicas=1, process_id=0, **fields))
        case "policy":
            published.put_now(PolicyPublished(**fields))
        case "pin":
            engine = harness.parts.engines.find(fields["engine_id"])
            if engine is not None:
                harness.pipeline.weight_sync.pin(engine, is_pinned=fields["is_pinned"])
        case "joined":
            ready = EngineReady(process_id=process_id, max_model_tokens=1 << 30, max_running=1 << 20, tensors=(), **fields)
            harness.engine_hub.say(peer, ready)
        case "left":
            harness.engine_hub.say(peer, Starting(process_id=process_id))
        case "member":
            if fields["state"] in (State.LEFT, State.LOST):
                harness.parts.engines.membership.lost(fields["engine_id"], fields["reason"])
        case kind:
            harness.engine_hub.say(peer, _SAID_BY_ENGINES[kind](**fields))
