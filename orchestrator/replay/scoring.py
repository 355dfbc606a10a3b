"""This module replays scoring: the real stages score recorded trajectories once more, with a real scorer in a process of its own."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress

from orchestrator.replay.differences import SHOWN, TOLERANCE, write_lines
from orchestrator.replay.harness import Harness, records, without_prm
from orchestrator.replay.recorded import RecordedGroup, RecordedRun
from orchestrator.stages.group_rewards import GroupRewards
from orchestrator.stages.scoring import Scoring
from pipelinerl.config import Config
from pipelinerl.config.file import write_run
from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.errors import PeerGone, PeerRefused
from pipelinerl.launch.processes import Processes
from pipelinerl.launch.roles import roles_of
from pipelinerl.messages import Failed, FromScorer, Outcome, Score, ScoredTrajectory, Stop
from pipelinerl.runtime.watch import wait_for
from pipelinerl.transport.keys import make_keys
from pipelinerl.transport.zmq import ZmqHub

SCORER = "scorer-0"


def run(recorded: RecordedRun) -> Iterator[str]:
    """Yield, line by line, how new scores differ from those recorded; batching takes the new ones."""
    config, groups = recorded.config, recorded.recording.groups
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("scoring", total=sum(len(group.members) for group in groups))
        told: Callable[[int], None] = lambda done: bar.update(task, completed=done)  # noqa: E731
        recorded.scored = asyncio.run(_score_again(config, groups, folder=recorded.folder, told=told))
    yield from _compare(groups, recorded.scored, path=recorded.folder / "scoring.jsonl", model_path=config.model.path)


async def _score_again(
    config: Config, groups: list[RecordedGroup], *, folder: Path, told: Callable[[int], None]
) -> dict[str, ScoredTrajectory]:
    """Have the rewards of `config` score every rollout; by rollout. `told` hears how many are done.

    Step scores are taken over, and so are the rollouts that were stopped early, which nobody scores. `folder` becomes a run folder.
    Raises what the scorer raises, for example for a function it cannot load.
    """
    write_run(folder, config)
    make_keys(folder, (SCORER,))
    recorded = {member.trajectory.rollout_id: member for group in groups for member in group.members}
    found: dict[str, ScoredTrajectory] = {}
    async with _scorer(config, folder) as (hub, processes):
        with records(folder) as (ledger, journal):
            harness = Harness(without_prm(config), ledger=ledger, journal=journal, num_siblings=len(groups[0].members), scorer_hub=hub)
            parts, scoring = harness.parts, harness.stage(Scoring)
            stages, last = [scoring], scoring.scored
            if config.compares_siblings:
                comparing = harness.stage(GroupRewards)
                stages, last = [scoring, comparing], comparing.group_scored
            parts.scorers.peers.on(Failed, _raise_failed)

            async def feed() -> None:
                for member in recorded.values():
                    if member.score.outcome is Outcome.STOPPED:
                        ledger.record_score(member, now_s=asyncio.get_running_loop().time())
                        await scoring.scored.put(member)
                    else:
                        await scoring.trajectories.put(member.trajectory)

            async def script() -> None:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(_notice_end(processes))]
                    deadline_s = config.engine.ready_deadline_s
                    await wait_for(parts.scorers.wait_until_ready(), peer=SCORER, what="to load the rewards", deadline_s=deadline_s)
                    tasks += [group.create_task(parts.watch.run()), group.create_task(feed())]
                    while len(found) < len(recorded):
                        scored = await last.get()
                        assert scored is not None, "nobody closes the channel"
                        name = scored.trajectory.rollout_id
                        found[name] = msgspec.structs.replace(recorded[name], score=scored.score)
                        told(len(found))
                    for task in tasks:
                        task.cancel()

            await harness.run(*stages, script=script())
    return found


@contextlib.asynccontextmanager
async def _scorer(config: Config, folder: Path) -> AsyncIterator[tuple[ZmqHub, Processes]]:
    """Start a scorer, and end it at the end."""
    hub, processes = ZmqHub(folder, "scorer", accepts=FromScorer), Processes(folder, environment={})
    async with asyncio.TaskGroup() as tasks:
        await processes.start(next(role for role in roles_of(config, folder) if role.name == SCORER), tasks)
        try:
            yield hub, processes
        finally:
            hub.dismiss(Stop(reason="replayed"))
            await processes.end_all()
            hub.close()


async def _notice_end(processes: Processes) -> None:
    await processes.ended.get()
    code = processes.exit_code(SCORER)
    raise PeerGone(f"the scorer ended with code {code} before everything was scored: see replay/logs/{SCORER}.log in the run's folder")


def _raise_failed(peer: str, failed: Failed) -> None:
    raise PeerRefused(f"{peer} failed: {failed.error}")


def _compare(groups: list[RecordedGroup], again: dict[str, ScoredTrajectory], *, path: Path, model_path: Path) -> Iterator[str]:
    """Write old and new scores of every rollout to `path`; yield the summary, line by line."""
    tokenizer = load_tokenizer(model_path)
    pairs = [(group, member, again[member.trajectory.rollout_id].score) for group in groups for member in group.members]
    changed = [pair for pair in pairs if not _same_score(pair[1].score, pair[2])]
    write_lines(path, (_score_line(group, member, new, tokenizer) for group, member, new in pairs))
    yield f"scoring: {len(pairs):,} rollouts, {len(pairs) - len(changed):,} as recorded, {len(changed):,} differ"
    if not pairs:
        return
    yield from _means([member.score for _, member, _ in pairs], [new for _, _, new in pairs])
    moves = collections.Counter((str(member.score.outcome), str(new.outcome)) for _, member, new in pairs)
    for (old, new), count in sorted(moves.items()):
        if old != new:
            yield f"  outcome {old} -> {new}: {count:,}"
    for group, member, new in sorted(changed, key=_size_of_change, reverse=True)[:SHOWN]:
        text = tokenizer.decode(member.trajectory.token_ids[len(group.prompt.token_ids) :])
        name = f"rollout {member.trajectory.rollout_id}, prompt {group.prompt.prompt_id}"
        yield f"  {name}: {_said(member.score)} -> {_said(new)}   {text[-60:]!r}"


def _same_score(old: Score, new: Score) -> bool:
    """Return whether two scores say the same."""
    if old.outcome is not new.outcome or old.components.keys() != new.components.keys():
        return False
    numbers = [(old.reward or 0.0, new.reward or 0.0), *((old.components[name], new.components[name]) for name in old.components)]
    return all(abs(before - after) <= TOLERANCE for before, after in numbers)


def _means(old: list[Score], new: list[Score]) -> Iterator[str]:
    def mean(values: list[float]) -> str:
        return f"{np.mean(values):.4g}" if values else "none"

    yield f"  reward, mean: {mean(_rewards(old))} -> {mean(_rewards(new))}"
    for name in dict.fromkeys(name for score in (*old, *new) for name in score.components):
        before, after = ([score.components[name] for score in side if name in score.components] for side in (old, new))
        yield f"  component {name}, mean: {mean(before)} -> {mean(after)}"
    yield f"  ms for one, mean: {np.mean([s.duration_s for s in old]) * 1e3:.3g} -> {np.mean([s.duration_s for s in new]) * 1e3:.3g}"


def _rewards(scores: list[Score]) -> list[float]:
    return [score.reward for score in scores if score.reward is not None]


def _size_of_change(pair: tuple[RecordedGroup, ScoredTrajectory, Score]) -> float:
    _, member, new = pair
    if member.score.reward is None or new.reward is None:
        return float("inf")
    return abs(member.score.reward - new.reward)


def _said(score: Score) -> str:
    return f"{score.reward:.4g}" if score.outcome is Outcome.OK else f"{score.outcome} ({score.error[:80]})"


def _score_line(group: RecordedGroup, member: ScoredTrajectory, new: Score, tokenizer: Any) -> dict[str, Any]:
    completion = tokenizer.decode(member.trajectory.token_ids[len(group.prompt.token_ids) :])
    return {
        "rollout_id": member.trajectory.rollout_id,
        "prompt_id": group.prompt.prompt_id,
        "step": group.step,
        "is_same": _same_score(member.score, new),
        "old": _score(member.score),
        "new": _score(new),
        "prompt": group.prompt.text,
        "completion": completion,
    }


def _score(score: Score) -> dict[str, Any]:
    return {"outcome": str(score.outcome), "reward": score.reward, "components": score.components, "error": score.error}
