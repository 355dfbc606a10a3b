"""The snapshot of a ledger from which a run goes on: read once, when an orchestrator starts.

A fresh ledger gives an empty snapshot, so a run that begins and one that goes on are started alike.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from orchestrator.ledger.ledger import REST_KEY, Ledger
from orchestrator.rules.curriculum import Rest, success_of
from pipelinerl.errors import LedgerError
from pipelinerl.messages import EarlyStopDecision, Prompt, Sample, ScoredTrajectory
from pipelinerl.transport.codec import Decoder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InterruptedRollout:
    """A rollout that was admitted and not scored: it is issued again."""

    rollout_id: str
    sibling: int
    attempt: int
    """The next attempt: every earlier one is fenced."""
    version: int
    """Version under which it was first issued: an older engine might sample what the bound then refuses."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InterruptedGroup:
    """The rollouts of one prompt that are to be issued again."""

    group_id: int
    prompt: Prompt
    rollouts: tuple[InterruptedRollout, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A step as the ledger holds it."""

    rows: tuple[tuple[Sample, ...], ...] = ()
    """The packed rows, in order."""
    unpacked: tuple[Sample, ...] = ()
    """Samples that were placed in the step and not packed yet."""
    groups: tuple[tuple[ScoredTrajectory, ...], ...] = ()
    """Groups that `unpacked` was made of, each with its greedy sibling where it has one."""
    num_groups: int = 0
    num_stopped: int = 0
    """Rollouts of its groups that were stopped early."""
    quarantined_rows: frozenset[int] = frozenset()
    """Numbers of the rows that are not sent again: they killed the trainer."""
    closed: tuple[int, int, str] | None = None
    """(tokens with a loss, samples, commit) where the step is closed."""

    @property
    def samples(self) -> list[Sample]:
        return [sample for row in self.rows for sample in row] + list(self.unpacked)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The point at which a run stands."""

    num_done: int
    """Steps that are in a policy, whether or not a checkpoint holds it."""
    next_group_id: int
    position: tuple[int, int]
    """The position of the prompt source: the next prompt to draw."""
    interrupted: tuple[InterruptedGroup, ...]
    scored: tuple[ScoredTrajectory, ...]
    """Trajectories that were scored, and not assigned to a step."""
    group_scored: frozenset[str]
    """Rollouts whose scores take their siblings into account."""
    prm_scored: frozenset[str]
    """Rollouts whose steps have scores."""
    early_stops: dict[tuple[str, int], EarlyStopDecision]
    """The early-stop decisions, by rollout in flight and attempt."""
    steps: dict[int, RecordedStep]
    """Steps from `num_done` on; the last one may be open."""
    num_assigned_groups: int
    """Groups assigned to any step so far."""
    running_groups: frozenset[int]
    """Groups admitted and not completed."""
    deaths: dict[str, dict[str, int]]
    """The number of deaths at which a prompt was present since it last came through, by role and prompt."""

    num_decided: int = 0
    """Steps that scripts have decided upon; the last of them may not be closed."""
    evaluations: tuple[tuple[int, float], ...] = ()
    """The pairs (version, mean reward) of the evaluations that are done."""

    @property
    def open_step(self) -> int:
        """The step being filled."""
        return max((number + (step.closed is not None) for number, step in self.steps.items()), default=self.num_done)


_trajectories: Decoder[ScoredTrajectory] = Decoder(ScoredTrajectory)
_prompts: Decoder[Prompt] = Decoder(Prompt)


def read_snapshot(ledger: Ledger) -> Snapshot:
    """Read everything that an orchestrator needs to go on. Raises `LedgerError` for a ledger that was damaged."""
    with ledger.store.readable():
        num_done = ledger.read_state("num_done", 0)
        drawn, epoch, row = ledger.read_state("drawn", (-1, 0, 0))
        scored = _scored(ledger, "step IS NULL AND group_id IN (SELECT group_id FROM groups WHERE number IS NULL)")
        names = {one.trajectory.rollout_id for one in scored}
        rescored = [row for row in ledger.store.rows("samples") if row[0] in names]
        interrupted = _interrupted(ledger)
        return Snapshot(
            num_done=num_done,
            next_group_id=drawn + 1,
            position=(epoch, row),
            interrupted=interrupted,
            scored=scored,
            group_scored=frozenset(name for name, *_, is_scored in rescored if is_scored),
            prm_scored=frozenset(name for name, *_, is_scored, _ in rescored if is_scored),
            early_stops=_early_stops(ledger),
            steps=read_steps(ledger, first=num_done),
            num_assigned_groups=ledger.read_state("num_assigned", 0),
            running_groups=frozenset({one.trajectory.group_id for one in scored} | {group.group_id for group in interrupted}),
            deaths=ledger.read_state("deaths", {}),
            num_decided=num_decided(ledger),
            evaluations=tuple((version, reward) for version, reward in ledger.store.rows("evaluations", "TRUE ORDER BY version")),
        )


def read_steps(ledger: Ledger, *, first: int, end: int = 2**62) -> dict[int, RecordedStep]:
    """Read steps `first` .. `end` - 1 as they were packed and closed: a trainer that starts again is given these once more. Raises
    `LedgerError` for a ledger that was damaged.
    """
    with ledger.store.readable():
        between = f"step >= {first} AND step < {end}"
        greedy = f"step IS NULL AND group_id IN (SELECT group_id FROM groups WHERE is_assigned AND {between})"
        baselines = {one.trajectory.group_id: one for one in _scored(ledger, greedy) if one.trajectory.is_greedy}
        bodies = {one.trajectory.rollout_id: one for one in _scored(ledger, between)}
        rows: dict[int, dict[int, list[Sample]]] = collections.defaultdict(lambda: collections.defaultdict(list))
        unpacked: dict[int, list[Sample]] = collections.defaultdict(list)
        for rollout_id, _, advantages, step, row, *_ in ledger.store.rows("samples", f"{between} ORDER BY step, row, position, rowid"):
            sample = _sample(bodies[rollout_id], np.frombuffer(advantages, np.float32))
            (unpacked[step] if row is None else rows[step][row]).append(sample)
        stopped = f"stopped_step >= {first} AND stopped_step < {end}"
        num_stopped = collections.Counter(step for *_, step, _, _ in ledger.store.rows("samples", stopped))
        num_groups = collections.Counter(step for *_, step, is_assigned in ledger.store.rows("groups", between) if is_assigned)
        closed = {step: values for step, *values in ledger.store.rows("steps", between)}
        steps: dict[int, RecordedStep] = {}
        for step in sorted({*rows, *unpacked, *closed, *num_groups}):
            num_rows, num_tokens, num_samples, seq = closed.get(step, [None] * 4)
            if num_rows is not None and len(rows[step]) != num_rows:
                raise LedgerError(f"step {step} was closed with {num_rows} rows, but the ledger holds {len(rows[step])} of them")
            steps[step] = RecordedStep(
                rows=tuple(tuple(rows[step][number]) for number in sorted(rows[step])),
                unpacked=tuple(unpacked[step]),
                groups=_groups((bodies[sample.trajectory.rollout_id] for sample in unpacked[step]), baselines=baselines),
                num_groups=num_groups[step],
                num_stopped=num_stopped[step],
                quarantined_rows=ledger.quarantined_rows(step),
                closed=None if num_rows is None else (num_tokens, num_samples, f"{ledger.store.ledger_id}:{seq}"),
            )
        return steps


def num_decided(ledger: Ledger) -> int:
    """Return how many steps scripts have decided upon."""
    return ledger.read_state("num_decided", 0)


def read_resting(ledger: Ledger) -> dict[int, Rest]:
    """Return the prompts that were outside the curriculum's band when they were last measured, by number."""
    of_prompts = ledger.store.rows("state", "key >= ? AND key < ?", REST_KEY, REST_KEY[:-1] + chr(ord(REST_KEY[-1]) + 1))
    found = {int(key.removeprefix(REST_KEY)): json.loads(value) for key, value in of_prompts}
    return {number: Rest(length=rest[0], measured_in=rest[1]) for number, rest in found.items() if rest is not None}


def read_successes(ledger: Ledger, *, correct_reward: float, group_size: int) -> list[tuple[str, float]]:
    """Return (prompt, part of its scored siblings that were correct) of every group that was completed and scored, in that order, and that
    `read_resting` knows nothing of: all of them in a run that was begun without `data.difficulty`, or by an earlier version.

    Siblings from `group_size` on are greedy, and not counted.
    """
    completed = ledger.store.rows("completed", "number > ? ORDER BY number", ledger.read_state("num_measured", 0))
    if not completed:  # no look at the whole history
        return []
    rewards: dict[int, list[float | None]] = collections.defaultdict(list)
    last = (
        "SELECT rollout_id, reward, max(seq) FROM events WHERE kind IN ('scored', 'prm_scored', 'group_scored') AND rollout_id IS NOT NULL"
    )
    for rollout_id, reward, _ in ledger.store.read(f"{last} GROUP BY rollout_id"):
        group_id, _, sibling = rollout_id.partition("/")
        if int(sibling) < group_size:
            rewards[int(group_id)].append(reward)
    prompts = {group_id: prompt_id for group_id, prompt_id, *_ in ledger.store.rows("drawn")}
    found = [(prompts[group_id], success_of(rewards[group_id], correct_reward=correct_reward)) for _, group_id, *_ in completed]
    return [(prompt_id, success) for prompt_id, success in found if success is not None]


def commit_of(ledger: Ledger, step: int) -> str | None:
    """Return the commit under which a step was closed; None where it was not, or where no checkpoint of it may be used any more."""
    found = ledger.store.rows("steps", "step = ?", step)
    return f"{ledger.store.ledger_id}:{found[0][-1]}" if found else None


def saved_versions(ledger: Ledger) -> list[int]:
    """Return the versions of the checkpoints that the ledger counts on, in order; those that `checkpoint.keep` removed are not among
    them.
    """
    return [version for version, _ in ledger.store.rows("checkpoints", "TRUE ORDER BY version")]


def first_kept_step(ledger: Ledger) -> int:
    """Return the step from which on rows are kept: the oldest version that a trainer may start from."""
    return ledger.read_state("oldest_version", 0)


def _scored(ledger: Ledger, where: str) -> tuple[ScoredTrajectory, ...]:
    """Return recorded trajectories, each with its group's prompt, in the order in which they were scored."""
    rows = ledger.store.rows
    samples = [(name, group_id) for name, group_id, *_ in rows("samples", f"{where} ORDER BY rowid")]
    prompts = {
        group_id: _prompts.decode(prompt)
        for group_id, prompt, *_ in rows("groups", f"group_id IN (SELECT group_id FROM samples WHERE {where})")
    }
    bodies = dict(rows("trajectories", f"rollout_id IN (SELECT rollout_id FROM samples WHERE {where})"))
    return tuple(with_prompt(_trajectories.decode(bodies[name]), prompts[group_id]) for name, group_id in samples)


def with_prompt(scored: ScoredTrajectory, prompt: Prompt) -> ScoredTrajectory:
    """Return a recorded trajectory with the prompt of its group, which is recorded apart from it; an agent begins in tokens of its own."""
    if (lent := scored.trajectory.lent) is not None:
        prompt = msgspec.structs.replace(prompt, token_ids=lent.prompt_token_ids)
    return msgspec.structs.replace(scored, trajectory=msgspec.structs.replace(scored.trajectory, prompt=prompt))


def _groups(scored: Iterable[ScoredTrajectory], *, baselines: Mapping[int, ScoredTrajectory]) -> tuple[tuple[ScoredTrajectory, ...], ...]:
    """Collect siblings, the greedy one, which stands in no step, as the last; `baselines` by group."""
    groups: dict[int, list[ScoredTrajectory]] = collections.defaultdict(list)
    for one in scored:
        groups[one.trajectory.group_id].append(one)
    return tuple((*members, baselines[group_id]) if group_id in baselines else tuple(members) for group_id, members in groups.items())


def _sample(scored: ScoredTrajectory, advantages: np.ndarray) -> Sample:
    assert scored.score.reward is not None, "a sample that was assigned has a reward"
    return Sample(trajectory=scored.trajectory, reward=scored.score.reward, advantages=advantages, weight=scored.weight)


def _interrupted(ledger: Ledger) -> tuple[InterruptedGroup, ...]:
    """Return the rollouts in flight that have no score."""
    scored = {rollout_id for (rollout_id,) in ledger.store.read("SELECT rollout_id FROM samples")}
    missing = {name: rollout for name, rollout in ledger.rollouts_in_flight().items() if name not in scored}
    wanted = {rollout.group_id for rollout in missing.values()}
    prompts = {group_id: _prompts.decode(prompt) for group_id, prompt, *_ in ledger.store.rows("groups") if group_id in wanted}
    groups: dict[int, list[InterruptedRollout]] = collections.defaultdict(list)
    for name, rollout in missing.items():
        sibling = int(name.partition("/")[2])
        again = InterruptedRollout(rollout_id=name, sibling=sibling, attempt=rollout.attempt + 1, version=rollout.version)
        groups[rollout.group_id].append(again)
    return tuple(
        InterruptedGroup(group_id=group_id, prompt=prompts[group_id], rollouts=tuple(rollouts))
        for group_id, rollouts in sorted(groups.items())
    )


def _early_stops(ledger: Ledger) -> dict[tuple[str, int], EarlyStopDecision]:
    """Return the decisions about the last attempt of each rollout in flight: an earlier attempt no longer counts."""
    said = {name: rollout.early_stop for name, rollout in ledger.rollouts_in_flight().items()}
    decisions = {
        name: msgspec.json.decode(decision, type=tuple[int, EarlyStopDecision]) for name, decision in said.items() if decision is not None
    }
    return {(name, attempt): decision for name, (attempt, decision) in decisions.items()}
