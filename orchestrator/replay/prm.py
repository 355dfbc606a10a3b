"""This module replays PRM scoring: rollouts are written once more, token by token, and get their recorded step scores.

Another `prm.early_stop` shows which rollouts it would have stopped. The model answers at once here, while in a run it may be behind: a
decision that came too late then may come in time now. A stopped rollout was never written to its end, so its reward is unknown.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

import msgspec
import numpy as np

from orchestrator.channels import Channels, make_channels
from orchestrator.ledger.ledger import Ledger
from orchestrator.peers.prm import Prm
from orchestrator.replay.clock import simulate
from orchestrator.replay.differences import SHOWN, write_lines
from orchestrator.replay.recorded import read_recording
from orchestrator.replay.recorded_peers import UNLIMITED_S, RecordedHub
from orchestrator.replay.recorded_run import RecordedRun
from orchestrator.stages.prm import PrmScoring, early_stopping
from pipelinerl.config import Config
from pipelinerl.errors import LedgerError
from pipelinerl.messages import Generate, Message, PrmReady, Sampling, ScoredTrajectory, StepsScored, Tokens, TraceScores, TraceTokens
from pipelinerl.runtime.stage import Signal
from pipelinerl.runtime.watch import Watch

_MODEL = "scorer-1"
_ANSWERED_S = 1e-3
"""Simulated seconds in which every message is heard and answered."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """A rollout after the PRM stage."""

    recorded: ScoredTrajectory
    now: ScoredTrajectory
    num_written: int
    """Tokens that were written, up to its end or its stop."""

    @property
    def was_stopped(self) -> bool:
        return self.recorded.early_stop is not None and self.recorded.early_stop.stops

    @property
    def is_stopped(self) -> bool:
        return self.now.early_stop is not None and self.now.early_stop.stops

    @property
    def has_other_steps(self) -> bool:
        """True where its step scores differ from the recorded ones, although it was stopped neither time."""
        if self.was_stopped or self.is_stopped:
            return False
        old, new = self.recorded.steps, self.now.steps
        assert old is not None, "only those that the model scored are replayed"
        return new is None or not (np.array_equal(old.ends, new.ends) and np.array_equal(old.scores, new.scores))


def run(recorded: RecordedRun) -> Iterator[str]:
    """Yield the differences, line by line. Raises `LedgerError` where no step scores are recorded."""
    config, run_folder = recorded.config, recorded.run_folder
    groups = read_recording(recorded.ledger_path).groups
    members = [member for group in groups for member in group.members if member.steps is not None]
    if not members:
        raise LedgerError(f"{run_folder} has no recorded step scores: it had no process reward model, or run.record_groups was 0")
    followed: list[Rescored] = simulate(_Replay(config, members).run())
    write_lines(recorded.folder / "prm.jsonl", map(_line, followed))
    newly = [one for one in followed if one.is_stopped and not one.was_stopped]
    no_more = [one for one in followed if one.was_stopped and not one.is_stopped]
    other = [one for one in followed if one.has_other_steps]
    num_steps = sum(len(one.recorded.steps.ends) for one in followed if one.recorded.steps is not None)
    yield (
        f"prm: {len(followed):,} rollouts with {num_steps:,} steps; {len(newly):,} are stopped that were not, {len(no_more):,} were"
        f" and are not, {len(other):,} have other step scores"
    )
    if newly:
        saved = sum(_num_sampled(one.recorded) - one.num_written for one in newly)
        yield f"  {saved:,} tokens of those would not have been written, of {sum(map(_num_sampled, members)):,} in all"
    for one in (*newly, *no_more)[:SHOWN]:
        yield f"  rollout {one.recorded.trajectory.rollout_id}: {_told(one.recorded)} -> {_told(one.now)}"


class _Replay:
    """The stage, between an engine and a model that only give recorded answers."""

    def __init__(self, config: Config, members: list[ScoredTrajectory]) -> None:
        watch = Watch(stall_limit_s=UNLIMITED_S)
        self._members = members
        self._steps = {member.trajectory.rollout_id: member.steps for member in members}
        self._chunk_tokens = config.prm.chunk_tokens
        self._hub = RecordedHub(told=lambda peer, message: self._answer(message))
        self._peers = self._hub.peers("scorer")
        self._channels: Channels = make_channels(watch=watch, queue_bytes=config.pipeline.queue_bytes, num_policies=1, has_prm=True)
        self._writing: str | None = None
        """The rollout that is being written, until it is complete or withdrawn."""
        self._ledger = Ledger(None)
        self._stage = PrmScoring(
            generated=self._channels.generated,
            trajectories=self._channels.trajectories,
            scored=self._channels.scored,
            prm_scored=self._channels.prm_scored,
            prm=Prm(self._peers),
            ledger=self._ledger,
            watch=watch,
            credits=Signal(),
            max_waiting_tokens=config.prm.max_waiting_tokens,
            stopping=early_stopping(config, engines=self),
        )

    async def run(self) -> list[Rescored]:
        self._hub.say(_MODEL, PrmReady(prm_id=1, process_id=1, version="recorded"))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(task.run()) for task in (self._peers, self._stage)]
            followed = [await self._replay_one(member) for member in self._members]
            for task in tasks:
                task.cancel()
        self._ledger.close()
        return followed

    def owes(self, rollout_id: str, attempt: int) -> bool:
        """Return whether a rollout is still being written, as engines do."""
        return self._writing == rollout_id

    def withdraw(self, rollout_id: str, attempt: int) -> None:
        """Stop writing a rollout, as engines do."""
        self._writing = None

    async def _replay_one(self, member: ScoredTrajectory) -> Rescored:
        trajectory = member.trajectory
        num_written = await self._write(member)
        self._writing = None
        await self._channels.generated.put(trajectory)
        await asyncio.sleep(_ANSWERED_S)
        if self._channels.trajectories.get_now() is not None:  # not one that was stopped, which nobody scores
            await self._channels.scored.put(ScoredTrajectory(trajectory=trajectory, score=member.score))
        now = await self._channels.prm_scored.get()
        assert now is not None, "nobody closes the channel"
        return Rescored(recorded=member, now=now, num_written=num_written)

    async def _write(self, member: ScoredTrajectory) -> int:
        """Have an engine write a rollout, until it is withdrawn; return the number of tokens written by then."""
        trajectory, num_prompt = member.trajectory, len(member.trajectory.prompt.token_ids)
        name, attempt = trajectory.rollout_id, trajectory.attempt
        sampled = trajectory.token_ids[num_prompt:]
        request = Generate(
            rollout_id=name, attempt=attempt, token_ids=trajectory.token_ids[:num_prompt], sampling=Sampling(max_tokens=len(sampled))
        )
        self._writing = name
        was_stopped = member.early_stop is not None and member.early_stop.stops
        # The last chunk comes with the whole rollout; of one that was stopped, all that is recorded came before.
        for start in range(0, len(sampled) if was_stopped else len(sampled) - self._chunk_tokens, self._chunk_tokens):
            part = sampled[start : start + self._chunk_tokens]
            self._stage.take(request, Tokens(rollout_id=name, attempt=attempt, start=start, token_ids=part))
            await asyncio.sleep(_ANSWERED_S)
            if self._writing is None:
                return start + len(part)
        return len(sampled)

    def _answer(self, message: Message) -> None:
        """Answer tokens with the recorded scores of the steps that they complete."""
        if not isinstance(message, TraceTokens):
            return
        steps = self._steps[message.rollout_id]
        assert steps is not None, "only those that the model scored are replayed"
        end = message.start + len(message.token_ids)
        first, after = (int(np.searchsorted(steps.ends, place)) for place in (message.start, end))
        if message.is_last:
            after = len(steps.ends)
        answer = StepsScored(
            rollout_id=message.rollout_id,
            attempt=message.attempt,
            num_taken=end,
            first=first,
            ends=steps.ends[first:after],
            scores=steps.scores[first:after],
            is_last=message.is_last,
            version=steps.version,
        )
        self._hub.say(_MODEL, answer)


def _num_sampled(member: ScoredTrajectory) -> int:
    return len(member.trajectory.token_ids) - len(member.trajectory.prompt.token_ids)


def _told(member: ScoredTrajectory) -> str:
    if member.early_stop is None:
        return "no decision"
    return (
        f"{'stopped' if member.early_stop.stops else 'went on'} at step {member.early_stop.step}, scored {member.early_stop.predicted:.4g}"
    )


def _line(one: Rescored) -> dict[str, object]:
    name = one.recorded.trajectory.rollout_id
    return {"rollout_id": name, "old": _plain(one.recorded), "new": _plain(one.now), "num_written": one.num_written}


def _plain(member: ScoredTrajectory) -> dict[str, object]:
    steps: TraceScores | None = member.steps
    return {
        "ends": None if steps is None else steps.ends.tolist(),
        "scores": None if steps is None else steps.scores.tolist(),
        "early_stop": None if member.early_stop is None else msgspec.to_builtins(member.early_stop),
    }
