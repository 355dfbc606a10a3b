"""This module replays batching: recorded groups make steps once more, in the order of their completion, with a ledger of their own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from orchestrator.advantages import MethodAdvantages
from orchestrator.channels import Channels, make_channels
from orchestrator.ledger.ledger import Ledger
from orchestrator.observe.progress import Progress
from orchestrator.replay.differences import compare_batches
from orchestrator.replay.recorded import RecordedGroup, read_recording
from orchestrator.replay.recorded_run import RecordedRun
from orchestrator.rollouts.rows import Row, StepEnd
from orchestrator.rules.admission import Admission, schedule_of
from orchestrator.rules.batch import BatchCut
from orchestrator.rules.grouping import Grouping
from orchestrator.stages.batching import Batching
from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.data.packing import Packing
from pipelinerl.messages import ScoredTrajectory
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.stage import Channel, Signal
from pipelinerl.runtime.watch import Watch


def run(recorded: RecordedRun) -> Iterator[str]:
    """Yield, line by line, how statuses and advantages differ from those recorded; training takes the new rows."""
    path, groups = recorded.folder / "ledger.sqlite", recorded.recording.from_a_step_on()
    scored = recorded.scored or {member.trajectory.rollout_id: member for group in groups for member in group.members}
    with contextlib.closing(Ledger(path, keep_groups=len(groups))) as ledger:
        ledger.begin({}, now_s=0.0, unix_s=time.time())
        for group in groups:
            ledger.admit(group.group_id, group.prompt, group_size=len(group.members), position=(0, 0), now_s=0.0)
            for member in group.members:
                ledger.record_score(scored[member.trajectory.rollout_id], now_s=0.0)
        asyncio.run(replay_batching(recorded.config, groups, scored=scored, folder=recorded.folder, ledger=ledger))
    recorded.ledger_path = path
    yield from compare_batches(groups, read_recording(path).groups, path=recorded.folder / "batching.jsonl")


async def replay_batching(
    config: Config, groups: list[RecordedGroup], *, scored: Mapping[str, ScoredTrajectory], folder: Path, ledger: Ledger
) -> None:
    """Have the method of `config` place or give up every group, from the step of the first on; what it decides stands in `ledger`.

    A rule that carries something from step to step begins afresh where the first steps of the run are not recorded any more.
    """
    watch = Watch(stall_limit_s=config.pipeline.stall_limit_s)
    channels = make_channels(watch=watch, queue_bytes=config.pipeline.queue_bytes, num_policies=1)
    journal = Journal(folder, "orchestrator")
    stage = _stage(config, groups, channels=channels, ledger=ledger, journal=journal)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_feed(groups, scored, channels.scored))
            group.create_task(_drain(channels.rows))
            await stage.run()
            channels.rows.close()
    finally:
        journal.close()


def _stage(config: Config, groups: list[RecordedGroup], *, channels: Channels, ledger: Ledger, journal: Journal) -> Batching:
    schedule = schedule_of(config.pipeline.mode, max_staleness=config.pipeline.max_staleness)
    advantages = MethodAdvantages(method_of(config), config.reward, correct_reward=config.algorithm.correct_reward)
    batch = config.batch
    return Batching(
        scored=channels.scored,
        packed=channels.packed,
        rows=channels.rows,
        grouping=Grouping(group_size=len(groups[0].members) if groups else 1),
        cut=BatchCut(
            groups_per_step=batch.groups_per_step,
            max_staleness=schedule.max_staleness,
            min_group_size=batch.min_group_size,
            group_advantages=advantages,
            rules=advantages.step_rules(),
            first_step=groups[0].step if groups else 0,
        ),
        packing=Packing(max_tokens=batch.max_tokens, num_replicas=config.trainer.layout.replicas),
        admission=Admission(schedule=schedule, groups_per_step=batch.groups_per_step, num_steps=config.trainer.steps, max_running=1),
        credits=Signal(),
        ledger=ledger,
        progress=Progress(journal=journal, started_s=0.0),
        max_dropped=len(groups) + 1,
    )


async def _feed(groups: list[RecordedGroup], scored: Mapping[str, ScoredTrajectory], channel: Channel[ScoredTrajectory]) -> None:
    for group in groups:
        for member in group.members:
            await channel.put(scored[member.trajectory.rollout_id])
    channel.close()


async def _drain(rows: Channel[Row | StepEnd]) -> None:
    async for _ in rows:
        pass
