"""This module replays weight sync: the recorded policies go to the recorded engines once more."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.replay.clock import simulate
from orchestrator.replay.differences import write_lines
from orchestrator.replay.events import Event, read_events
from orchestrator.replay.recorded_peers import ENGINE_KINDS, RecordedEngines, needed, run_recorded
from orchestrator.replay.recorded_run import RecordedRun
from pipelinerl.config import Config
from pipelinerl.messages import StageWeights
from pipelinerl.observe.journal import Journal

Age = tuple[int, int]
"""The pair (rollback epoch, version) of a policy."""


def run(recorded: RecordedRun) -> Iterator[str]:
    """Yield, line by line, the orders to each engine, beside those that the engine answered in the run."""
    config, run_folder, folder = recorded.config, recorded.run_folder, recorded.folder
    events = needed(read_events(run_folder, kinds=ENGINE_KINDS), run_folder=run_folder)
    orders = _order_again(config, events, folder=folder)
    answered = _answered(events)
    write_lines(
        folder / "weight_sync.jsonl",
        (
            {"engine_id": engine_id, "old": answered[engine_id], "new": [*orders[engine_id]]}
            for engine_id in sorted(answered.keys() | orders.keys())
        ),
    )
    differing = {engine_id: where for engine_id in answered if (where := _first_difference(answered[engine_id], orders[engine_id]))}
    num_policies = len({_age(event) for event in events if event.kind == "policy"})
    num_orders = sum(map(len, orders.values()))
    yield f"weight_sync: {num_policies:,} policies, {len(orders)} engines, {num_orders:,} orders; {len(differing)} engines differ"
    for engine_id, where in sorted(differing.items()):
        yield f"  engine-{engine_id}: {where}"
    yield from _times(events, orders)


def _order_again(config: Config, events: list[Event], *, folder: Path) -> dict[int, dict[Age, float]]:
    """Return the policies that each engine is told to fetch, in order, each with its second."""
    with contextlib.closing(Journal(folder, "orchestrator")) as journal:

        async def run() -> RecordedEngines:
            side = RecordedEngines(config, journal=journal)
            await run_recorded(events, hear=side.hear, stages=(*side.peers, side.weight_sync), rest_s=1.0)
            return side

        sent = simulate(run()).engine_hub.sent
    orders: dict[int, dict[Age, float]] = collections.defaultdict(dict)
    for seconds, peer, message in sent:
        if isinstance(message, StageWeights):
            orders[int(peer.rpartition("-")[2])].setdefault((message.rollback_epoch, message.version), seconds)
    return orders


def _answered(events: list[Event]) -> dict[int, list[Age]]:
    """Return the policies that each engine staged or refused, in order, each once."""
    ages: dict[int, list[Age]] = collections.defaultdict(list)
    for event in events:
        if event.kind in ("staged", "swap", "refused") and _age(event) not in ages[event.fields["engine_id"]]:
            ages[event.fields["engine_id"]].append(_age(event))
    return ages


def _first_difference(old: list[Age], new: dict[Age, float]) -> str | None:
    """Describe the first order that differs from the answered ones. A last order without any engine left to answer it is no difference."""
    for number, (before, now) in enumerate(itertools.zip_longest(old, new)):
        if before != now and (before is not None or number + 1 < len(new)):
            return f"order {number + 1}: {_name(before)} -> {_name(now)}"
    return None


def _times(events: list[Event], orders: dict[int, dict[Age, float]]) -> Iterator[str]:
    """Yield how long policies took to reach the engines in the run, from the replayed order on."""
    published = {_age(event): event.t for event in events if event.kind == "policy"}
    swaps = [(event.fields["engine_id"], _age(event), event.t) for event in events if event.kind == "swap"]
    for engine_id, ordered in sorted(orders.items()):
        done = {age: t for engine, age, t in swaps if engine == engine_id}
        waited = [1000 * (done[age] - t) for age, t in ordered.items() if age in done]
        skipped = [age for age in published if age not in done and done and age < max(done)]
        named = ", ".join(str(version) for _, version in skipped[:8]) + (", ..." if len(skipped) > 8 else "")
        yield (
            f"  engine-{engine_id}: {len(done):,} policies committed, {len(skipped):,} skipped{f' ({named})' if skipped else ''};"
            f" order to commit {_milliseconds(waited)}"
        )
    reached = {age: [t for _, other, t in swaps if other >= age] for age in published}
    spread = [1000 * (min(times) - published[age]) for age, times in reached.items() if times]
    yield f"  from publication to the first engine that samples under it, or under a later one: {_milliseconds(spread)}"


def _milliseconds(values: list[float]) -> str:
    return f"median {np.median(values):.3g} ms, at most {max(values):.3g} ms" if values else "never"


def _age(event: Event) -> Age:
    fields: dict[str, Any] = event.fields
    return fields["rollback_epoch"], fields["version"]


def _name(age: Age | None) -> str:
    if age is None:
        return "none"
    return f"policy {age[1]}" + (f" of rollback epoch {age[0]}" if age[0] else "")
