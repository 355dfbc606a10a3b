"""What a ledger remembers for whoever goes on with its run: read once, when an orchestrator starts.

A fresh ledger gives an empty snapshot, so a run that begins and one that goes on are started alike.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from orchestrator.rules.curriculum import success_of
from orchestrator.state.ledger import Ledger
from pipelinerl.errors import LedgerError
from pipelinerl.messages import Flag, Prompt, Sample, ScoredTrajectory
from pipelinerl.transport.codec import Decoder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """A rollout that was admitted and not scored: it is issued again."""

    rollout_id: str
    sibling: int
    attempt: int
    """The next one: every earlier one is fenced."""
    version: int
    """Of the engine it was first asked of: an older engine might sample what the bound then refuses."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InterruptedGroup:
    """The rollouts of one prompt that are to be issued again."""

    group_id: int
    prompt: Prompt
    rollouts: tuple[Interrupted, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """What the ledger holds of a step."""

    rows: tuple[tuple[Sample, ...], ...] = ()
    """Packed, in order."""
    loose: tuple[Sample, ...] = ()
    """Placed in the step and not packed yet."""
    groups: tuple[tuple[ScoredTrajectory, ...], ...] = ()
    """What `loose` was made of, a group each, with its greedy sibling where it has one."""
    num_groups: int = 0
    num_stopped: int = 0
    """Rollouts of its groups that were stopped early."""
    seal: tuple[int, int, str] | None = None
    """(tokens with a loss, samples, commit) where the step was sealed."""

    @property
    def samples(self) -> list[Sample]:
        return [sample for row in self.rows for sample in row] + list(self.loose)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Where a run stands."""

    num_done: int
    """Steps that are in a policy, whether or not a checkpoint holds it."""
    next_group_id: int
    position: tuple[int, int]
    """Of the prompt source: the next prompt to draw."""
    interrupted: tuple[InterruptedGroup, ...]
    scored: tuple[ScoredTrajectory, ...]
    """Scored, and not placed in a step."""
    compared: frozenset[str]
    """Rollouts that were compared with their siblings."""
    followed: frozenset[str]
    """Rollouts whose steps have scores."""
    flags: dict[tuple[str, int], Flag]
    """By rollout in flight and attempt: how its coin fell."""
    steps: dict[int, RecordedStep]
    """Steps from `num_done` on; the last one may be open."""
    num_placed_groups: int
    """Groups placed in any step so far."""
    running_groups: frozenset[int]
    """Groups admitted and neither placed nor given up."""
    deaths: dict[str, dict[str, int]]
    """By role, by prompt: how often it was there when a peer died, and has not come through since."""

    evaluations: tuple[tuple[int, float], ...] = ()
    """(version, mean reward) of those that are done."""

    @property
    def open_step(self) -> int:
        """The step being filled."""
        return max((number + (step.seal is not None) for number, step in self.steps.items()), default=self.num_done)


_trajectories: Decoder[ScoredTrajectory] = Decoder(ScoredTrajectory)
_prompts: Decoder[Prompt] = Decoder(Prompt)


def read_snapshot(ledger: Ledger) -> Snapshot:
    """Everything an orchestrator needs to go on. Raises `LedgerError` for a ledger that was damaged."""
    with ledger.store.readable():
        return _read_snapshot(ledger)


def _read_snapshot(ledger: Ledger) -> Snapshot:
    read = ledger.store.read
    num_done = read("SELECT count(*) FROM events WHERE kind = 'done' AND rollout_id IS NULL")[0][0]
    last = read("SELECT group_id, epoch, row FROM groups ORDER BY group_id DESC LIMIT 1")
    steps = _read_steps(ledger, first=num_done, end=None)
    scored = _scored(ledger, "step IS NULL AND group_id NOT IN (SELECT group_id FROM settled)")
    amended = read("SELECT kind, rollout_id FROM events WHERE kind IN ('compared', 'followed') AND rollout_id IS NOT NULL")
    interrupted = _interrupted(ledger)
    running = {scored_one.trajectory.group_id for scored_one in scored} | {group.group_id for group in interrupted}
    return Snapshot(
        num_done=num_done,
        next_group_id=last[0][0] + 1 if last else 0,
        position=tuple(last[0][1:]) if last else (0, 0),
        interrupted=interrupted,
        scored=scored,
        compared=frozenset(name for kind, name in amended if kind == "compared"),
        followed=frozenset(name for kind, name in amended if kind == "followed"),
        flags=_flags(ledger),
        steps=steps,
        num_placed_groups=read("SELECT count(*) FROM groups WHERE step IS NOT NULL")[0][0],
        running_groups=frozenset(running),
        deaths=_deaths(ledger),
        evaluations=tuple(read("SELECT step, reward FROM events WHERE kind = 'evaluated' AND rollout_id IS NULL ORDER BY seq")),
    )


def read_steps(ledger: Ledger, *, first: int, end: int | None = None) -> dict[int, RecordedStep]:
    """Steps `first` .. `end` - 1 as they were packed and sealed: what a trainer that starts again is given once more.

    Raises `LedgerError` for a ledger that was damaged.
    """
    with ledger.store.readable():
        return _read_steps(ledger, first=first, end=end)


def _read_steps(ledger: Ledger, *, first: int, end: int | None) -> dict[int, RecordedStep]:
    bounds = (first, 2**62 if end is None else end)
    query = "SELECT rollout_id, step, row, advantages FROM samples WHERE step >= ? AND step < ? ORDER BY step, row, place, rowid"
    places = ledger.store.read(query, *bounds)
    bodies = {one.trajectory.rollout_id: one for one in _scored(ledger, f"step >= {bounds[0]} AND step < {bounds[1]}")}
    rows: dict[int, dict[int, list[Sample]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    loose: dict[int, list[Sample]] = collections.defaultdict(list)
    for rollout_id, step, row, advantages in places:
        sample = _sample(bodies[rollout_id], np.frombuffer(advantages, np.float32))
        (loose[step] if row is None else rows[step][row]).append(sample)
    seals = ledger.store.read(
        "SELECT step, num_tokens, place, seq, row FROM events WHERE kind = 'sealed' AND rollout_id IS NULL AND step >= ? AND step < ?",
        *bounds,
    )
    sealed = {step: (num_tokens, num_samples, f"{ledger.store.ledger_id}:{seq}") for step, num_tokens, num_samples, seq, _ in seals}
    groups = dict(ledger.store.read("SELECT step, count(*) FROM groups WHERE step >= ? AND step < ? GROUP BY step", *bounds))
    greedy = f"step IS NULL AND group_id IN (SELECT group_id FROM groups WHERE step >= {bounds[0]} AND step < {bounds[1]})"
    baselines = {one.trajectory.group_id: one for one in _scored(ledger, greedy) if one.trajectory.is_greedy}
    stopped = (
        "SELECT step, count(*) FROM events WHERE kind = 'filtered' AND rollout_id IS NOT NULL AND step >= ? AND step < ? GROUP BY step"
    )
    num_stopped = dict(ledger.store.read(stopped, *bounds))
    steps = {
        step: RecordedStep(
            rows=tuple(tuple(rows[step][number]) for number in sorted(rows[step])),
            loose=tuple(loose[step]),
            groups=_groups((bodies[sample.trajectory.rollout_id] for sample in loose[step]), baselines=baselines),
            num_groups=groups.get(step, 0),
            num_stopped=num_stopped.get(step, 0),
            seal=sealed.get(step),
        )
        for step in sorted(rows.keys() | loose.keys() | sealed.keys() | groups.keys())
    }
    for step, _, _, _, num_rows in seals:
        if len(steps[step].rows) != num_rows:
            raise LedgerError(f"step {step} was sealed with {num_rows} rows, but the ledger holds {len(steps[step].rows)} of them")
    return steps


def read_successes(ledger: Ledger, *, correct_reward: float, group_size: int) -> list[tuple[str, float]]:
    """(prompt, part of its scored siblings that were correct) of every group that was settled and scored, in that order.

    Siblings from `group_size` on are greedy, and not counted.
    """
    rewards: dict[int, list[float | None]] = collections.defaultdict(list)
    last = "SELECT rollout_id, reward, max(seq) FROM events WHERE kind IN ('scored', 'followed', 'compared') AND rollout_id IS NOT NULL"
    for rollout_id, reward, _ in ledger.store.read(f"{last} GROUP BY rollout_id"):
        group_id, _, sibling = rollout_id.partition("/")
        if int(sibling) < group_size:
            rewards[int(group_id)].append(reward)
    settled = ledger.store.read("SELECT group_id, prompt_id FROM settled JOIN groups USING (group_id) ORDER BY number")
    found = [(prompt_id, success_of(rewards[group_id], correct_reward=correct_reward)) for group_id, prompt_id in settled]
    return [(prompt_id, success) for prompt_id, success in found if success is not None]


def commit_of(ledger: Ledger, step: int) -> str | None:
    """The commit under which a step was sealed; None where it was not."""
    found = ledger.store.read("SELECT seq FROM events WHERE kind = 'sealed' AND rollout_id IS NULL AND step = ?", step)
    return f"{ledger.store.ledger_id}:{found[0][0]}" if found else None


def is_saved(ledger: Ledger, version: int) -> bool:
    """True where the ledger knows of a checkpoint of `version`."""
    query = "SELECT 1 FROM events WHERE kind = 'saved' AND rollout_id IS NULL AND step = ? LIMIT 1"
    return bool(ledger.store.read(query, version))


def _scored(ledger: Ledger, where: str) -> tuple[ScoredTrajectory, ...]:
    """Recorded trajectories, each with its group's prompt, in the order in which they were scored."""
    query = f"SELECT group_id, prompt FROM groups WHERE group_id IN (SELECT group_id FROM samples WHERE {where})"
    prompts = {group_id: _prompts.decode(body) for group_id, body in ledger.store.read(query)}
    bodies = ledger.store.read(
        f"SELECT group_id, scored FROM samples JOIN trajectories USING (rollout_id) WHERE {where} ORDER BY samples.rowid"
    )
    return tuple(_with_prompt(_trajectories.decode(body), prompts[group_id]) for group_id, body in bodies)


def _with_prompt(scored: ScoredTrajectory, prompt: Prompt) -> ScoredTrajectory:
    return msgspec.structs.replace(scored, trajectory=msgspec.structs.replace(scored.trajectory, prompt=prompt))


def _groups(scored: Iterable[ScoredTrajectory], *, baselines: Mapping[int, ScoredTrajectory]) -> tuple[tuple[ScoredTrajectory, ...], ...]:
    """Siblings together, the greedy one, which stands in no step, last; `baselines` by group."""
    groups: dict[int, list[ScoredTrajectory]] = collections.defaultdict(list)
    for one in scored:
        groups[one.trajectory.group_id].append(one)
    return tuple((*members, baselines[group_id]) if group_id in baselines else tuple(members) for group_id, members in groups.items())


def _sample(scored: ScoredTrajectory, advantages: np.ndarray) -> Sample:
    assert scored.score.reward is not None, "a sample that was placed has a reward"
    return Sample(trajectory=scored.trajectory, reward=scored.score.reward, advantages=advantages, weight=scored.weight)


def _interrupted(ledger: Ledger) -> tuple[InterruptedGroup, ...]:
    """What is in flight and has no score."""
    scored = {rollout_id for (rollout_id,) in ledger.store.read("SELECT rollout_id FROM samples")}
    missing = {name: rollout for name, rollout in ledger.open_rollouts().items() if name not in scored}
    attempts = (
        "SELECT rollout_id, max(attempt), max(newest) FROM events WHERE kind = 'issued' AND rollout_id IS NOT NULL GROUP BY rollout_id"
    )
    issued = {name: (attempt, version) for name, attempt, version in ledger.store.read(attempts) if name in missing}
    prompts = {
        group_id: _prompts.decode(body)
        for group_id, body in ledger.store.read("SELECT group_id, prompt FROM groups WHERE prompt IS NOT NULL")
        if group_id in {rollout.group_id for rollout in missing.values()}
    }
    groups: dict[int, list[Interrupted]] = collections.defaultdict(list)
    for name, rollout in missing.items():
        attempt, version = issued.get(name, (-1, 0))
        sibling = int(name.partition("/")[2])
        groups[rollout.group_id].append(Interrupted(rollout_id=name, sibling=sibling, attempt=attempt + 1, version=version))
    return tuple(
        InterruptedGroup(group_id=group_id, prompt=prompts[group_id], rollouts=tuple(rollouts))
        for group_id, rollouts in sorted(groups.items())
    )


def _flags(ledger: Ledger) -> dict[tuple[str, int], Flag]:
    in_flight = ledger.open_rollouts()
    query = "SELECT rollout_id, attempt, place, reward, reason FROM events WHERE kind = 'flagged' AND rollout_id IS NOT NULL"
    return {
        (name, attempt): Flag(step=step, predicted=predicted, **msgspec.json.decode(reason))
        for name, attempt, step, predicted, reason in ledger.store.read(query)
        if name in in_flight
    }


def _deaths(ledger: Ledger) -> dict[str, dict[str, int]]:
    query = "SELECT kind, peer, reason FROM events WHERE kind IN ('suspected', 'cleared') AND rollout_id IS NULL ORDER BY seq"
    return count_deaths(ledger.store.read(query))


def count_deaths(entries: Iterable[tuple[str, str, str]]) -> dict[str, dict[str, int]]:
    """By role and prompt, from the entries (kind, peer, prompt) in their order."""
    deaths: dict[str, dict[str, int]] = collections.defaultdict(lambda: collections.defaultdict(int))
    for kind, peer, prompt in entries:
        role = peer.partition("-")[0]
        if kind == "suspected":
            deaths[role][prompt] += 1
        else:
            deaths[role].pop(prompt, None)
    return {role: dict(counts) for role, counts in deaths.items()}
