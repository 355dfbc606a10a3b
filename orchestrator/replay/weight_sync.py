"""This module replays weight sync: the recorded policies go to the recorded engines once more."""

from __future__ import annotations

import asyncio
import collections
import functools
import itertools
from collections.abc import Iterator

import numpy as np

from orchestrator.replay.clock import simulate
from orchestrator.replay.differences import write_lines
from orchestrator.replay.events import Event
from orchestrator.replay.harness import Harness, as_scored, records
from orchestrator.replay.recorded import RecordedRun
from orchestrator.replay.recorded_engines import read_policies, repeat, say
from orchestrator.stages.weight_sync import WeightSync
from pipelinerl.messages import Message, StageWeights

Age = tuple[int, int]
"""The pair (rollback epoch, version) of a policy."""


def run(recorded: RecordedRun) -> Iterator[str]:
    """Yield, line by line, the orders to each engine, beside those that the engine answered in the run."""
    events = read_policies(recorded.run_folder)
    orders: dict[int, dict[Age, float]] = simulate(_order_again(recorded, events))
    answered = _answered(events)
    engine_ids = sorted(answered.keys() | orders.keys())
    lines = ({"engine_id": engine_id, "old": answered[engine_id], "new": [*orders[engine_id]]} for engine_id in engine_ids)
    write_lines(recorded.folder / "weight_sync.jsonl", lines)
    differing = {engine_id: where for engine_id in answered if (where := _first_difference(answered[engine_id], orders[engine_id]))}
    num_policies = len({_age(event) for event in events if event.kind == "policy"})
    num_orders = sum(map(len, orders.values()))
    yield f"weight_sync: {num_policies:,} policies, {len(orders)} engines, {num_orders:,} orders; {len(differing)} engines differ"
    for engine_id, where in sorted(differing.items()):
        yield f"  engine-{engine_id}: {where}"
    yield from _times(events, orders)


async def _order_again(recorded: RecordedRun, events: list[Event]) -> dict[int, dict[Age, float]]:
    """Return the policies that each engine is told to fetch, in order, each with its second."""
    orders: dict[int, dict[Age, float]] = collections.defaultdict(dict)

    def told(peer: str, message: Message) -> None:
        if isinstance(message, StageWeights):
            age = (message.rollback_epoch, message.version)
            orders[int(peer.rpartition("-")[2])].setdefault(age, asyncio.get_running_loop().time())

    with records(recorded.folder) as (ledger, journal):
        harness = Harness(as_scored(recorded.config), ledger=ledger, journal=journal)
        harness.engine_hub.told = told
        await harness.run(harness.stage(WeightSync), script=repeat(events, hear=functools.partial(say, harness)))
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
    return event.fields["rollback_epoch"], event.fields["version"]


def _name(age: Age | None) -> str:
    if age is None:
        return "none"
    return f"policy {age[1]}" + (f" of rollback epoch {age[0]}" if age[0] else "")
