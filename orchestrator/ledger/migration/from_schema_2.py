"""Reads a ledger of schema 2, which had no checksums, and kept no state beside the history: a resumed run read all that had ever happened.

What it found there is put into the tables of schema 3, by the very questions that it asked. Checksums are of what is found now: nobody can
tell whether that was damaged before.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from typing import Any

from orchestrator.ledger.events import count_death
from orchestrator.ledger.rollouts import RUN_ENDED

Row = tuple[Any, ...]
_FATES = """
    SELECT rollout_id, kind, coalesce(reason, '') AS reason FROM events e
    WHERE rollout_id IS NOT NULL AND kind IN ('trained', 'filtered', 'stale', 'failed', 'cancelled') AND NOT EXISTS (
        SELECT 1 FROM events r WHERE r.rollout_id = e.rollout_id AND r.kind = 'revived' AND r.seq > e.seq)
"""


def read_events(old: sqlite3.Connection) -> Iterable[Row]:
    """Yield every entry, in order."""
    return old.execute("SELECT * FROM events ORDER BY seq")


def read_tables(old: sqlite3.Connection) -> dict[str, Iterable[Row]]:
    """Return the rows of every table but `events`, as schema 3 would have kept them. Raises `KeyError` and `ValueError` for what cannot be
    read."""
    read = old.execute
    is_live = "group_id IN (SELECT group_id FROM groups WHERE prompt IS NOT NULL)"
    settled = "SELECT group_id, prompt, number, settled.step, is_placed FROM groups LEFT JOIN settled USING (group_id)"
    amended = {
        kind: {name for (name,) in read("SELECT rollout_id FROM events WHERE kind = ?", (kind,))} for kind in ("followed", "compared")
    }
    stopped = dict(read("SELECT rollout_id, step FROM events WHERE kind = 'filtered' AND rollout_id IS NOT NULL AND step IS NOT NULL"))
    samples = (
        (
            name,
            group_id,
            advantages,
            step,
            row,
            place,
            stopped.get(name),
            int(name in amended["followed"]),
            int(name in amended["compared"]),
        )
        for name, group_id, advantages, step, row, place in read(
            f"SELECT rollout_id, group_id, advantages, step, row, place FROM samples WHERE {is_live} ORDER BY rowid"
        )
    )
    seals = "SELECT step, row, num_tokens, place, seq FROM events WHERE kind = 'sealed' AND rollout_id IS NULL AND step >= ? - 1"
    oldest = _oldest(old)
    evaluated = "SELECT step, reward FROM events WHERE kind = 'evaluated' AND rollout_id IS NULL"
    saved = "SELECT step, reason FROM events WHERE kind = 'saved' AND rollout_id IS NULL AND step >= ?"
    return {
        "drawn": read("SELECT group_id, prompt_id, epoch, row FROM groups ORDER BY group_id"),
        "settled": read("SELECT number, group_id, step, is_placed FROM settled ORDER BY number"),
        "groups": read(f"{settled} WHERE prompt IS NOT NULL ORDER BY group_id"),
        "samples": samples,
        "trajectories": read(
            f"SELECT rollout_id, scored FROM trajectories WHERE rollout_id IN (SELECT rollout_id FROM samples WHERE {is_live})"
        ),
        "steps": read(seals, (oldest,)),
        "saves": read(saved, (oldest,)),
        "evaluations": read(evaluated),
        "counts": _counts(old),
        "in_flight": _in_flight(old),
        "state": [(key, json.dumps(value)) for key, value in _state(old, oldest=oldest).items()],
    }


def _oldest(old: sqlite3.Connection) -> int:
    """Return the newest checkpoint: schema 2 kept the rows of no step before it."""
    return old.execute("SELECT coalesce(max(step), 0) FROM events WHERE kind = 'saved' AND rollout_id IS NULL").fetchone()[0]


def _counts(old: sqlite3.Connection) -> Iterable[tuple[str, str, int]]:
    return old.execute(f"SELECT kind, reason, count(*) FROM ({_FATES}) GROUP BY 1, 2")


def _in_flight(old: sqlite3.Connection) -> list[tuple[Any, ...]]:
    """Yield the rollouts in flight, and those that were when the run ended, in the order in which they were admitted."""
    fates = {name: (fate, reason) for name, fate, reason in old.execute(_FATES)}
    issued = "SELECT rollout_id, max(attempt), max(newest) FROM events WHERE kind = 'issued' AND rollout_id IS NOT NULL GROUP BY rollout_id"
    attempts = {name: (attempt, version) for name, attempt, version in old.execute(issued)}
    flags = "SELECT rollout_id, attempt, place, reward, reason FROM events WHERE kind = 'flagged' AND rollout_id IS NOT NULL ORDER BY seq"
    fallen = {
        name: (attempt, json.dumps([attempt, {"step": step, "predicted": predicted, **json.loads(reason)}]))
        for name, attempt, step, predicted, reason in old.execute(flags)
    }
    rows = []
    for name, group_id, prompt_id in old.execute("SELECT rollout_id, group_id, prompt_id FROM events WHERE kind = 'admitted' ORDER BY seq"):
        fate = fates.get(name)
        if fate is None or fate == ("cancelled", RUN_ENDED):
            attempt, version = attempts.get(name, (-1, 0))
            flagged, flag = fallen.get(name, (None, None))
            rows.append((name, group_id, prompt_id, attempt, version, flag if flagged == attempt else None, int(fate is not None)))
    return rows


def _state(old: sqlite3.Connection, *, oldest: int) -> dict[str, Any]:
    def one(query: str) -> Any:
        return old.execute(query).fetchone()[0]

    deaths: dict[str, dict[str, int]] = {}
    entries = "SELECT kind, peer, reason FROM events WHERE kind IN ('suspected', 'cleared') AND rollout_id IS NULL ORDER BY seq"
    for kind, peer, row in old.execute(entries):
        count_death(deaths, kind, peer=peer, suspect=row)
    baselines = old.execute("SELECT reason FROM events WHERE kind = 'baselines' ORDER BY seq DESC LIMIT 1").fetchone()
    drawn = old.execute("SELECT group_id, epoch, row FROM groups ORDER BY group_id DESC LIMIT 1").fetchone()
    return {
        "seq": one("SELECT coalesce(max(seq), 0) FROM events"),
        "done": one("SELECT count(*) FROM events WHERE kind = 'done' AND rollout_id IS NULL"),
        "settled": one("SELECT coalesce(max(number), 0) FROM settled"),
        "placed": one("SELECT count(*) FROM settled WHERE is_placed"),
        "drawn": list(drawn or (-1, 0, 0)),
        "deaths": deaths,
        "baselines": json.loads(baselines[0]) if baselines else {},
        "oldest": oldest,
    }
