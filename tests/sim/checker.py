"""Judges a simulated run from what the ledger recorded and what the trainer saw. Shares no code with the product."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from tests.sim.peers import TrainerRecord

FATES = ("trained", "filtered", "stale", "failed", "cancelled")


def check(
    rows: Sequence[tuple[Any, ...]],
    record: TrainerRecord,
    *,
    groups_per_step: int | None,
    num_steps: int,
    max_staleness: int,
    max_tokens: int,
) -> list[str]:
    """Everything that breaks a promise, as sentences; empty for a clean run of all its steps. `groups_per_step` None: a script says it."""
    return [
        *_of_ledger(rows),
        *_of_both(rows, record),
        *_of_rollouts(record, max_staleness=max_staleness),
        *_of_steps(rows, record, groups_per_step=groups_per_step, num_steps=num_steps, max_tokens=max_tokens),
    ]


def check_counts(rows: Sequence[tuple[Any, ...]], counts: dict[str, int]) -> list[str]:
    """What the conservation identity says, against the recorded fates of a run that has ended."""
    recorded = collections.Counter(row[3] for row in rows)
    wrong = [f"{counts[fate]} {fate} counted, {recorded[fate]} recorded" for fate in FATES if counts[fate] != recorded[fate]]
    if counts["in_flight"]:
        wrong.append(f"{counts['in_flight']} in flight after the end")
    if counts["admitted"] != counts["in_flight"] + sum(counts[fate] for fate in FATES):
        wrong.append(f"{counts['admitted']} admitted is not the sum of the fates")
    return wrong


def _of_ledger(rows: Sequence[tuple[Any, ...]]) -> list[str]:
    wrong: list[str] = []
    times = collections.Counter(row[0] for row in rows)
    wrong += [f"{rollout} ended {count} times" for rollout, count in times.items() if count > 1]
    for rollout, _, _, fate, reason, step, reward, oldest, newest, num_tokens, admitted_s, ended_s in rows:
        if fate not in FATES:
            wrong.append(f"{rollout} ended as {fate}")
        if (fate == "trained") == bool(reason):
            wrong.append(f"{rollout} ended as {fate} for the reason {reason!r}")
        if fate == "trained" and (step is None or reward is None or oldest is None or newest < oldest or num_tokens < 1):
            wrong.append(f"{rollout} was trained without its facts")
        if not admitted_s <= ended_s:
            wrong.append(f"{rollout} ended at {ended_s} s, before it was admitted at {admitted_s} s")
    return wrong


def _of_both(rows: Sequence[tuple[Any, ...]], record: TrainerRecord) -> list[str]:
    booked = {row[0]: (row[5], row[7], row[9]) for row in rows if row[3] == "trained"}
    seen = {rollout: (step, record.oldest[rollout], record.num_tokens[rollout]) for rollout, step in record.trained.items()}
    return [
        f"{rollout}: the ledger says (step, oldest version, tokens) {booked.get(rollout)}, the trainer saw {seen.get(rollout)}"
        for rollout in sorted(booked.keys() | seen.keys())
        if booked.get(rollout) != seen.get(rollout)
    ]


def _of_rollouts(record: TrainerRecord, *, max_staleness: int) -> list[str]:
    wrong = [f"{rollout} trained twice" for rollout in record.repeated]
    wrong += [f"{rollout} carries versions that did not sample its tokens" for rollout in record.mislabelled]
    for rollout, step in record.trained.items():
        if step - record.oldest[rollout] > max_staleness:
            wrong.append(f"{rollout} trained at step {step} with a token of version {record.oldest[rollout]}")
        if record.oldest[rollout] > step:
            wrong.append(f"{rollout} trained at step {step} with a token of the future version {record.oldest[rollout]}")
    return wrong


def _of_steps(
    rows: Sequence[tuple[Any, ...]], record: TrainerRecord, *, groups_per_step: int | None, num_steps: int, max_tokens: int
) -> list[str]:
    wrong: list[str] = []
    stopped = [row for row in rows if row[4] == "stopped early" and row[5] is not None]
    num_stopped = collections.Counter(row[5] for row in stopped)
    groups: dict[int, set[str]] = collections.defaultdict(set)
    steps_of_group: dict[str, set[int]] = collections.defaultdict(set)
    for rollout, step in record.trained.items():
        group = rollout.split("/")[0]
        groups[step].add(group)
        steps_of_group[group].add(step)
    for row in stopped:
        groups[row[5]].add(row[0].split("/")[0])
        steps_of_group[row[0].split("/")[0]].add(row[5])
    wrong += [f"group {group} trained in steps {sorted(steps)}" for group, steps in steps_of_group.items() if len(steps) > 1]
    if sorted(record.sealed) != list(range(num_steps)):
        wrong.append(f"steps {sorted(record.sealed)} were sealed, not 0 to {num_steps - 1}")
    for step, seal in record.sealed.items():
        if len(groups[step]) != (groups_per_step or len(groups[step])):
            wrong.append(f"step {step} trained {len(groups[step])} groups, not {groups_per_step}")
        for what, said, trained in (
            ("tokens", seal.num_tokens, record.tokens[step]),
            ("samples", seal.num_samples, record.samples[step] + num_stopped[step]),
            ("micro-batches", seal.num_micro_batches, record.micro_batches[step]),
        ):
            if said != trained:
                wrong.append(f"step {step} sealed with {said} {what}, trained {trained}")
    if record.longest_row > max_tokens:
        wrong.append(f"a row had {record.longest_row} tokens, at most {max_tokens} are allowed")
    return wrong
