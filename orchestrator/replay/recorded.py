"""A recorded run: the completed groups, the prompts and the closed steps in its ledger, which are what stages are given and have given."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from orchestrator.ledger.snapshot import with_prompt
from orchestrator.rollouts.rows import StepEnd
from pipelinerl.config import Config
from pipelinerl.errors import LedgerError
from pipelinerl.messages import Float32, Prompt, ScoredTrajectory
from pipelinerl.transport.codec import Decoder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchingResult:
    """The result of batching for a rollout."""

    status: str
    """The text `step N`, or the terminal status with its reason."""
    row: tuple[int, int] | None
    """The pair (row, position) in its step."""
    advantages: Float32 | None
    """[L] float32; None where it does not train."""

    stopped_step: int | None = None
    """The step in which it counts as a sample although it was stopped early; None where it was not, or its group is in no step."""

    @property
    def credit(self) -> Float32 | None:
        """The advantages that are not zero."""
        return None if self.advantages is None else self.advantages[self.advantages != 0]

    @property
    def step(self) -> int | None:
        """The step that it is assigned to."""
        return int(self.status.removeprefix("step ")) if self.status.startswith("step ") else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """A group that was assigned to a step or dropped."""

    number: int
    """Its place in the order in which groups were completed, from 1."""
    group_id: int
    step: int
    """The step that was being filled when the group was completed."""
    prompt: Prompt
    members: tuple[ScoredTrajectory, ...]
    """All siblings, in order."""
    results: dict[str, BatchingResult]
    """The results by rollout."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The completed groups that a ledger still holds complete, oldest first."""

    groups: list[RecordedGroup]
    num_completed: int
    """Groups completed in the whole run."""

    def from_a_step_on(self) -> list[RecordedGroup]:
        """Return the groups from the first step on from which nothing is missing."""
        start = len(self.groups)
        while start > 1 and self.groups[start - 2].number == self.groups[start - 1].number - 1:
            start -= 1
        tail = self.groups[start - 1 :] if self.groups else []
        if not tail or tail[0].number == 1:
            return tail
        return [group for group in tail if group.step > tail[0].step]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPrompt:
    """A prompt that was admitted."""

    group_id: int
    prompt_id: str
    prompt: Prompt | None
    """The prompt; None where only its name stays recorded."""
    position: tuple[int, int]
    """The position (epoch, row) of the source after the draw."""


@dataclasses.dataclass(slots=True, kw_only=True)
class RecordedRun:
    """The run under replay, and the new results of replayed stages in place of the recorded ones."""

    config: Config
    """The run's settings, some of them changed."""
    run_folder: Path
    folder: Path
    """The folder for the results of the replay."""
    ledger_path: Path
    """The run's own ledger, or the one that batching has written."""
    scored: dict[str, ScoredTrajectory] = dataclasses.field(default_factory=dict)
    """The results of scoring, by rollout; empty where it was not replayed."""
    _recordings: dict[Path, Recording] = dataclasses.field(default_factory=dict)

    @property
    def recording(self) -> Recording:
        """The groups in the ledger. Raises `LedgerError` where there are none."""
        if self.ledger_path not in self._recordings:
            self._recordings = {self.ledger_path: read_recording(self.ledger_path)}
        recording = self._recordings[self.ledger_path]
        if not recording.groups:
            raise LedgerError(f"{self.run_folder} has no recorded group: none was completed yet, or run.record_groups was 0")
        return recording


_trajectories: Decoder[ScoredTrajectory] = Decoder(ScoredTrajectory)
_prompts: Decoder[Prompt] = Decoder(Prompt)


def read_recording(path: Path) -> Recording:
    """Read the completed groups of a ledger. Raises `LedgerError` where there is no ledger."""
    with open_ledger(path) as database:
        ends = "SELECT rollout_id, kind, reason FROM events WHERE rollout_id IN (SELECT rollout_id FROM samples) AND kind = ?"
        statuses = {
            rollout_id: f"{kind}: {reason}" if reason else kind
            for each in ("filtered", "stale", "failed")
            for rollout_id, kind, reason in database.execute(ends, (each,))
        }
        members: dict[int, list[ScoredTrajectory]] = collections.defaultdict(list)
        results: dict[int, dict[str, BatchingResult]] = collections.defaultdict(dict)
        columns = "group_id, rollout_id, scored, step, row, position, advantages, stopped_step"
        for group_id, rollout_id, scored, step, row, position, advantages, stopped_step in database.execute(
            f"SELECT {columns} FROM samples JOIN trajectories USING (rollout_id)"
        ):
            members[group_id].append(_trajectories.decode(scored))
            results[group_id][rollout_id] = BatchingResult(
                status=f"step {step}" if step is not None else statuses.get(rollout_id, "in flight"),
                row=None if row is None else (row, position),
                advantages=None if advantages is None else np.frombuffer(advantages, np.float32),
                stopped_step=stopped_step,
            )
        sizes = dict(database.execute("SELECT group_id, count(*) FROM events WHERE kind = 'admitted' GROUP BY group_id"))
        groups: list[RecordedGroup] = []
        query = "SELECT number, group_id, step, prompt FROM groups WHERE number IS NOT NULL ORDER BY number"
        for number, group_id, step, encoded in database.execute(query):
            if len(members[group_id]) == sizes[group_id]:
                prompt = _prompts.decode(encoded)
                siblings = sorted(members[group_id], key=lambda member: member.trajectory.sibling)
                whole = tuple(with_prompt(member, prompt) for member in siblings)
                group = RecordedGroup(number=number, group_id=group_id, step=step, prompt=prompt, members=whole, results=results[group_id])
                groups.append(group)
        return Recording(groups=groups, num_completed=database.execute("SELECT count(*) FROM completed").fetchone()[0])


def read_prompts(path: Path) -> list[RecordedPrompt]:
    """Return every prompt that was admitted, in order. Raises `LedgerError` where there is no ledger."""
    with open_ledger(path) as database:
        query = "SELECT group_id, prompt_id, prompt, epoch, drawn.row FROM drawn LEFT JOIN groups USING (group_id) ORDER BY group_id"
        return [
            RecordedPrompt(
                group_id=group_id,
                prompt_id=prompt_id,
                prompt=None if prompt is None else _prompts.decode(prompt),
                position=(epoch, row),
            )
            for group_id, prompt_id, prompt, epoch, row in database.execute(query)
        ]


def read_closed_steps(path: Path) -> dict[int, StepEnd]:
    """Return every closed step, by number. Raises `LedgerError` where there is no ledger."""
    with open_ledger(path) as database:
        ledger_id = database.execute("SELECT id FROM ledger").fetchone()[0]
        query = "SELECT step, num_tokens, num_samples, seq FROM events WHERE kind = 'closed' AND rollout_id IS NULL ORDER BY seq"
        return {
            step: StepEnd(step=step, num_tokens=num_tokens, num_samples=num_samples, commit=f"{ledger_id}:{seq}")
            for step, num_tokens, num_samples, seq in database.execute(query)
        }


@contextlib.contextmanager
def open_ledger(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a ledger to read. Raises `LedgerError` where there is none, or one of another version."""
    if not path.is_file():
        raise LedgerError(f"no ledger at {path}: name the folder of a run")
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        try:
            yield database
        except sqlite3.OperationalError as error:
            raise LedgerError(f"{path} is no ledger that can be replayed ({error}): an earlier version's records too little") from error
