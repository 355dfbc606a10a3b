"""This module replays batching: recorded groups make steps once more, in the order of their completion, with a ledger of their own."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.ledger.ledger import Ledger
from orchestrator.replay.clock import simulate
from orchestrator.replay.differences import SHOWN, TOLERANCE, write_lines
from orchestrator.replay.harness import Harness, as_scored, records
from orchestrator.replay.recorded import BatchingResult, RecordedGroup, RecordedRun, read_recording
from orchestrator.stages.batching import Batching
from pipelinerl.config import Config
from pipelinerl.observe.journal import Journal


def run(recorded: RecordedRun) -> Iterator[str]:
    """Yield, line by line, how statuses and advantages differ from those recorded; training takes the new rows."""
    path, groups = recorded.folder / "ledger.sqlite", recorded.recording.from_a_step_on()
    with records(recorded.folder, ledger=path, keep_groups=len(groups)) as (ledger, journal):
        ledger.begin({}, now_s=0.0, unix_s=time.time())
        for group in groups:
            ledger.admit(group.group_id, group.prompt, group_size=len(group.members), position=(0, 0), now_s=0.0)
            for member in group.members:
                ledger.record_score(recorded.scored.get(member.trajectory.rollout_id, member), now_s=0.0)
        simulate(replay_batching(recorded.config, groups, ledger=ledger, journal=journal))
    recorded.ledger_path = path
    yield from _compare(groups, read_recording(path).groups, path=recorded.folder / "batching.jsonl")


async def replay_batching(config: Config, groups: list[RecordedGroup], *, ledger: Ledger, journal: Journal) -> None:
    """Have the method of `config` assign or drop every group, from the step of the first on; `ledger` has them as scored, as in a run that
    goes on, and holds what is decided.

    A rule that carries something from step to step begins afresh where the first steps of the run are not recorded any more.
    """
    if not groups:
        return
    ledger.record("done", now_s=0.0, step=groups[0].step - 1)
    harness = Harness(as_scored(config), ledger=ledger, journal=journal, num_siblings=len(groups[0].members))
    batching = harness.stage(Batching)

    async def drain() -> None:
        async for _ in batching.rows:
            pass

    async def script() -> None:
        batching.scored.close()
        async with asyncio.TaskGroup() as group:
            group.create_task(drain())
            await batching.run()
            batching.rows.close()

    await harness.run(script=script())


def _compare(groups: list[RecordedGroup], again: list[RecordedGroup], *, path: Path) -> Iterator[str]:
    """Write old and new statuses and advantages of every rollout to `path`; yield the summary, line by line."""
    new_ones = {name: result for group in again for name, result in group.results.items()}
    pairs = [(group, name, old, new_ones[name]) for group in groups for name, old in group.results.items()]
    write_lines(
        path,
        (
            {"rollout_id": name, "prompt_id": group.prompt.prompt_id, "old": _line(old), "new": _line(new)}
            for group, name, old, new in pairs
        ),
    )
    moved = [(old.status, new.status) for _, _, old, new in pairs if old.status != new.status]
    credited = [pair for pair in pairs if _gap(pair) > TOLERANCE]
    rows = sum(old.row != new.row for _, _, old, new in pairs)
    first = f"from step {groups[0].step} on" if groups else "no whole step is recorded"
    yield f"batching: {len(pairs):,} rollouts, {first}: {len(moved):,} end otherwise, {len(credited):,} with other advantages"
    for (old, new), count in collections.Counter((_kind(old), _kind(new)) for old, new in moved).most_common():
        yield f"  {old} -> {new if new != old else 'another ' + new}: {count:,}"
    for group, name, old, new in sorted(credited, key=_gap, reverse=True)[:SHOWN]:
        yield f"  rollout {name}, prompt {group.prompt.prompt_id}: advantage {_mean(old)} -> {_mean(new)}"
    if rows and not moved:
        yield f"  {rows:,} in another row, or place of it, of the same step"


def _line(result: BatchingResult) -> dict[str, Any]:
    return {"status": result.status, "row": result.row, "advantage_sum": None if result.credit is None else float(result.credit.sum())}


def _gap(pair: tuple[RecordedGroup, str, BatchingResult, BatchingResult]) -> float:
    _, _, old, new = pair
    if old.advantages is None or new.advantages is None:
        return 0.0
    return float(np.abs(old.advantages - new.advantages).max())


def _mean(result: BatchingResult) -> str:
    return "0" if result.credit is None or not len(result.credit) else f"{result.credit.mean():.4g}"


def _kind(status: str) -> str:
    return "step" if status.startswith("step ") else status
