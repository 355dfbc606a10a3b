"""The kinds of entries in the ledger's history, and the meaning of each column.

Every entry is `t` (seconds on the clock of the process that wrote it, see `began`), a kind, and the columns of that kind; others are NULL.

    of the run
    began       the orchestrator starts, first or again; `data`: its settings and its clock in Unix seconds
    ended       the run ends; `reason`, and the counts in `data`
    evaluated   `version`, with the mean `reward`
    baselines   the baselines, in `data`, of a method that keeps some
    suspected   `suspect` was there when `peer` died: a row of the data, or `step/row` of the trainer's
    cleared     the suspect came through
    quarantined the suspect was there twice: it is sampled, or sent to the trainer (`step`, `row`), no more
    skipped     a quarantined prompt was drawn

    of a step or a checkpoint
    closed      the step has all its rows: `num_rows`, `num_samples`, `num_tokens`; the entry's number is the step's commit; `data`:
                its loss, and its demonstrations, where a script named one (then samples and tokens are theirs)
    done        the step is in a policy                 retrained   it is once more, after a restart from a checkpoint
    saved       a checkpoint of `version` and `commit_id` unsaved   the checkpoint could not be written, `reason`
    discarded   a saved checkpoint cannot be used any more; `reason`: its damage, or that it is gone
    restarted   the trainer starts from `version`       survived    the trainer, at `version`, survived the orchestrator

    of a rollout
    admitted    with its group and prompt               issued      an `attempt`, to `peer`, which samples under `version`
    lost        the attempt, and why                    reattached  an attempt that survived in its engine
    held        an attempt that was answered before a restart, and that the script which goes on has read
    reset       an environment with state begins the `attempt`, which is issued next; `reason`: ok, or how it failed
    observed    the environment, at `turn`, of what `peer` wrote; `reason`: ok, over, or how it failed
    early_stop  the decision after `prm_step` steps, whose `score` is too low; `data`: whether it stops, probability of going on
    generated   the attempt: tokens, versions, how it finished
    scored      the attempt: outcome and reward         prm_scored  its steps have scores, or it cannot train
    group_scored  the outcome and the reward that count once its siblings were compared
    assigned    to a step                               packed      in `row`, at `position`, of the step
    trained, filtered, stale, failed, cancelled: its terminal status
    revived     cancelled when the run ended, which goes on
"""

from __future__ import annotations

import math
from typing import Any, TypedDict, get_args, get_type_hints


class Columns(TypedDict, total=False):
    """Columns of an entry beside its number, its time and its kind, in the table's order."""

    rollout_id: str | None
    group_id: int | None
    prompt_id: str | None
    attempt: int | None
    step: int | None
    row: int | None
    position: int | None
    turn: int | None
    prm_step: int | None
    peer: str | None
    reason: str | None
    reward: float | None
    score: float | None
    version: int | None
    oldest_version: int | None
    newest_version: int | None
    num_tokens: int | None
    num_rows: int | None
    num_samples: int | None
    commit_id: str | None
    suspect: str | None
    data: str | None
    """JSON."""


NAMES = tuple(Columns.__annotations__)
SQL_TYPES = {name: {int: "INTEGER", float: "REAL", str: "TEXT"}[get_args(kind)[0]] for name, kind in get_type_hints(Columns).items()}
"""SQLite's type of each column."""


def values_of(columns: Columns) -> tuple[Any, ...]:
    """Return the columns in the table's order; SQLite has no NaN."""
    numbers = {name: number_or_null(columns.get(name)) for name in ("reward", "score")}
    return tuple(map((columns | numbers).get, NAMES))


def number_or_null(value: float | None) -> float | None:
    """Return a number as SQLite keeps it."""
    return None if value is None or math.isnan(value) else float(value)


def count_death(deaths: dict[str, dict[str, int]], kind: str, *, peer: str, suspect: str) -> None:
    """Count an entry of the kind `suspected` or `cleared`, by role and suspect."""
    of_role = deaths.setdefault(peer.partition("-")[0], {})
    if kind == "suspected":
        of_role[suspect] = of_role.get(suspect, 0) + 1
    else:
        of_role.pop(suspect, None)
