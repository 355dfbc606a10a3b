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

from orchestrator.replay.clock import simulate
from orchestrator.replay.differences import SHOWN, write_lines
from orchestrator.replay.harness import Harness, empty_completion, records
from orchestrator.replay.recorded import RecordedRun, read_recording
from orchestrator.stages.prm import PrmScoring
from pipelinerl.config import Config
from pipelinerl.errors import ConfigError, LedgerError
from pipelinerl.messages import (
    Cancel,
    EngineReady,
    Finish,
    Generate,
    Message,
    PrmReady,
    Sampling,
    ScoredTrajectory,
    StepsScored,
    Tokens,
    TraceScores,
    TraceTokens,
)

_ENGINE, _MODEL = "engine-0", "scorer-1"
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
        """Its step scores differ from the recorded ones, although it was stopped neither time."""
        if self.was_stopped or self.is_stopped:
            return False
        old, new = self.recorded.steps, self.now.steps
        assert old is not None, "only those that the model scored are replayed"
        return new is None or not (np.array_equal(old.ends, new.ends) and np.array_equal(old.scores, new.scores))


def run(recorded: RecordedRun) -> Iterator[str]:
    """Yield the differences, line by line. Raises `LedgerError` where no step scores are recorded."""
    if recorded.config.environment.is_used:
        raise ConfigError(
            "prm cannot be replayed: this run has an environment, whose episodes are scored once they are over, so that nobody was stopped"
            " early. The other stages can."
        )
    groups = read_recording(recorded.ledger_path).groups
    members = [member for group in groups for member in group.members if member.steps is not None]
    if not members:
        raise LedgerError(f"{recorded.run_folder} has no recorded step scores: it had no process reward model, or run.record_groups was 0")
    followed: list[Rescored] = simulate(_follow(recorded, members))
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


async def _follow(recorded: RecordedRun, members: list[ScoredTrajectory]) -> list[Rescored]:
    with records(recorded.folder) as (ledger, journal):
        harness = Harness(recorded.config, ledger=ledger, journal=journal)
        replay = _Replay(harness, members, config=recorded.config)
        return await harness.run(replay.stage, script=replay.run())


class _Replay:
    """An engine and a process reward model that only give recorded answers."""

    def __init__(self, harness: Harness, members: list[ScoredTrajectory], *, config: Config) -> None:
        self._harness = harness
        self.stage = harness.stage(PrmScoring)
        self._members = members
        self._steps = {member.trajectory.rollout_id: member.steps for member in members}
        self._chunk_tokens = config.prm.chunk_tokens
        self._is_withdrawn = False
        """True where the rollout that is being written is to end."""
        harness.scorer_hub.told = lambda peer, message: self._score(message)
        harness.engine_hub.told = lambda peer, message: self._hear(message)

    async def run(self) -> list[Rescored]:
        ready = EngineReady(engine_id=0, process_id=1, version=0, max_model_tokens=1 << 30, max_running=1, tensors=())
        self._harness.engine_hub.say(_ENGINE, ready)
        self._harness.scorer_hub.say(_MODEL, PrmReady(prm_id=1, process_id=1, version="recorded"))
        await asyncio.sleep(_ANSWERED_S)
        return [await self._replay_one(member) for member in self._members]

    async def _replay_one(self, member: ScoredTrajectory) -> Rescored:
        trajectory = member.trajectory
        num_written = await self._write(member)
        await self.stage.generated.put(trajectory)
        await asyncio.sleep(_ANSWERED_S)
        if self.stage.trajectories.get_now() is not None:  # not one that was stopped, which nobody scores
            await self.stage.scored.put(ScoredTrajectory(trajectory=trajectory, score=member.score))
        now = await self.stage.prm_scored.get()
        assert now is not None, "nobody closes the channel"
        return Rescored(recorded=member, now=now, num_written=num_written)

    async def _write(self, member: ScoredTrajectory) -> int:
        """Have the engine write a rollout, until it is withdrawn; return the number of tokens written by then."""
        trajectory, num_prompt = member.trajectory, len(member.trajectory.prompt.token_ids)
        name, attempt = trajectory.rollout_id, trajectory.attempt
        sampled = trajectory.token_ids[num_prompt:]
        request = Generate(
            rollout_id=name, attempt=attempt, token_ids=trajectory.token_ids[:num_prompt], sampling=Sampling(max_tokens=len(sampled))
        )
        self._is_withdrawn, num_written = False, len(sampled)
        self._harness.parts.engines.requests.ask(request, 0, sink=lambda completion, engine_id: None, lost=lambda engine_id: None)
        was_stopped = member.early_stop is not None and member.early_stop.stops
        # The last chunk comes with the whole rollout; of one that was stopped, all that is recorded came before.
        for start in range(0, len(sampled) if was_stopped else len(sampled) - self._chunk_tokens, self._chunk_tokens):
            part = sampled[start : start + self._chunk_tokens]
            self._harness.engine_hub.say(_ENGINE, Tokens(rollout_id=name, attempt=attempt, start=start, token_ids=part))
            await asyncio.sleep(_ANSWERED_S)
            if self._is_withdrawn:
                num_written = start + len(part)
                break
        self._harness.engine_hub.say(_ENGINE, empty_completion(request, finish=Finish.STOP))
        await asyncio.sleep(_ANSWERED_S)
        return num_written

    def _hear(self, message: Message) -> None:
        """Stop writing where the engine is told to."""
        self._is_withdrawn |= isinstance(message, Cancel)

    def _score(self, message: Message) -> None:
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
        self._harness.scorer_hub.say(_MODEL, answer)


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
