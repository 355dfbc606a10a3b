"""This module replays scoring: the real stages score recorded trajectories once more, with a real scorer in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress

from orchestrator.channels import Channels, make_channels
from orchestrator.ledger.ledger import Ledger
from orchestrator.peers.peers import Peers
from orchestrator.peers.scorers import Scorers
from orchestrator.replay.differences import compare_scores
from orchestrator.replay.recorded import RecordedGroup
from orchestrator.replay.recorded_run import RecordedRun
from orchestrator.rules.grouping import Grouping
from orchestrator.rules.quarantine import Quarantine
from orchestrator.stages.group_rewards import GroupRewards
from orchestrator.stages.scoring import Scoring
from pipelinerl.config import Config
from pipelinerl.config.file import write_run
from pipelinerl.errors import PeerGone
from pipelinerl.messages import FromScorer, Outcome, ScoredTrajectory, Stop
from pipelinerl.runtime.process import die_with_parent
from pipelinerl.runtime.stage import Stage
from pipelinerl.runtime.watch import Watch, wait_for
from pipelinerl.transport.keys import make_keys
from pipelinerl.transport.zmq import ZmqHub

END_S = 10.0
"""The seconds in which the scorer is to end when it is told to; after that it is killed."""


def run(recorded: RecordedRun) -> Iterator[str]:
    """Yield, line by line, how new scores differ from those recorded; batching takes the new ones."""
    config, groups = recorded.config, recorded.recording.groups
    with Progress(console=Console(stderr=True), transient=True) as bar, contextlib.closing(Ledger(None)) as ledger:
        task = bar.add_task("scoring", total=sum(len(group.members) for group in groups))
        told: Callable[[int], None] = lambda done: bar.update(task, completed=done)  # noqa: E731
        recorded.scored = asyncio.run(replay_scoring(config, groups, folder=recorded.folder, ledger=ledger, told=told))
    yield from compare_scores(groups, recorded.scored, path=recorded.folder / "scoring.jsonl", model_path=config.model.path)


async def replay_scoring(
    config: Config, groups: list[RecordedGroup], *, folder: Path, ledger: Ledger, told: Callable[[int], None]
) -> dict[str, ScoredTrajectory]:
    """Have the rewards of `config` score every rollout; by rollout. `told` hears how many are done.

    Step scores are taken over, and so are the rollouts that were stopped early, which nobody scores.

    `folder` becomes a run folder. Raises what the scorer raises, for example for a function it cannot load.
    """
    write_run(folder, config)
    make_keys(folder, ("scorer-0",))
    hub = ZmqHub(folder, "scorer", accepts=FromScorer)
    process = await _start_scorer(folder)
    try:
        return await _score(config, groups, hub=hub, process=process, ledger=ledger, told=told)
    finally:
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        hub.close()


async def _score(
    config: Config,
    groups: list[RecordedGroup],
    *,
    hub: ZmqHub,
    process: asyncio.subprocess.Process,
    ledger: Ledger,
    told: Callable[[int], None],
) -> dict[str, ScoredTrajectory]:
    watch = Watch(stall_limit_s=config.pipeline.stall_limit_s)
    limit_s = config.engine.ready_deadline_s
    silent_after_s = config.scorer.silent_after_s
    peers = Peers(hub, role="scorer", expected=1, ready_deadline_s=limit_s, silent_after_s=silent_after_s, failure_ends_run=True)
    scorers = Scorers(peers, expected=1, ledger=ledger, watch=watch, quarantine=Quarantine({}))
    channels = make_channels(
        watch=watch, queue_bytes=config.pipeline.queue_bytes, num_policies=1, compares_siblings=config.compares_siblings
    )
    stages = _stages(config, channels, group_size=len(groups[0].members), scorers=scorers, ledger=ledger)
    found: dict[str, ScoredTrajectory] = {}
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each.run()) for each in (peers, *stages)]
        tasks.append(group.create_task(_notice_end(process, folder_log="replay/logs/scorer-0.log")))
        try:
            await wait_for(scorers.wait_until_ready(), peer="scorer-0", what="to load the rewards", deadline_s=limit_s)
            tasks.append(group.create_task(watch.run()))
            tasks.append(group.create_task(_feed(groups, channels, ledger)))
            await _collect(groups, channels, found=found, told=told)
        finally:
            peers.dismiss(Stop(reason="replayed"))
            for task in tasks:
                task.cancel()
    return found


def _stages(config: Config, channels: Channels, *, group_size: int, scorers: Scorers, ledger: Ledger) -> list[Stage]:
    stages: list[Stage] = [
        Scoring(trajectories=channels.trajectories, scored=channels.scored, scorers=scorers, ledger=ledger),
    ]
    if config.compares_siblings:
        stages.append(
            GroupRewards(
                scored=channels.prm_scored,
                group_scored=channels.group_scored,
                scorers=scorers,
                ledger=ledger,
                grouping=Grouping(group_size=group_size),
                min_group_size=config.batch.min_group_size,
            )
        )
    return stages


async def _feed(groups: list[RecordedGroup], channels: Channels, ledger: Ledger) -> None:
    for group in groups:
        for member in group.members:
            if member.score.outcome is Outcome.STOPPED:
                ledger.record_score(member, now_s=asyncio.get_running_loop().time())
                await channels.scored.put(member)
            else:
                await channels.trajectories.put(member.trajectory)


async def _collect(
    groups: list[RecordedGroup], channels: Channels, *, found: dict[str, ScoredTrajectory], told: Callable[[int], None]
) -> None:
    recorded = {member.trajectory.rollout_id: member for group in groups for member in group.members}
    while len(found) < len(recorded):
        scored = await channels.group_scored.get()
        assert scored is not None, "nobody closes the channel"
        name = scored.trajectory.rollout_id
        found[name] = msgspec.structs.replace(recorded[name], score=scored.score)
        told(len(found))


async def _start_scorer(folder: Path) -> asyncio.subprocess.Process:
    (folder / "logs").mkdir(exist_ok=True)
    log = os.open(folder / "logs" / "scorer-0.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pipelinerl.rewards", "--run-folder", str(folder), "--index", "0"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
    finally:
        os.close(log)


async def _notice_end(process: asyncio.subprocess.Process, *, folder_log: str) -> None:
    code = await process.wait()
    raise PeerGone(f"the scorer ended with code {code} before everything was scored: see {folder_log} in the run's folder")
