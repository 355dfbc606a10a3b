"""Reads a ledger of schema 3, and gives what stood in it, and what `from_schema_2` makes of an older one, the names of schema 4.

Schema 3 put several things into one column: the counts of a closed step into `row` and `place`, a PRM's score into `reward`, a commit into
`reason`, a version into `step`. Kinds of entries, statuses in tables and fields of recorded messages had other names.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from orchestrator.ledger.events import Columns, values_of
from orchestrator.ledger.migration.from_schema_2 import Row
from pipelinerl.errors import LedgerError
from pipelinerl.storage import checksum

_TABLES = ("drawn", "settled", "state", "counts", "in_flight", "groups", "samples", "trajectories", "steps", "saves", "evaluations")
_RENAMED_TABLES = {"settled": "completed", "saves": "checkpoints"}
_RENAMED_STATE = {
    "done": "num_done",
    "settled": "num_completed",
    "placed": "num_assigned",
    "measured": "num_measured",
    "refused": "quarantined_rows",
    "oldest": "oldest_version",
}
_COLUMNS = (
    *("rollout_id", "group_id", "prompt_id", "attempt", "step", "row", "place"),
    *("peer", "reason", "reward", "oldest", "newest", "num_tokens"),
)
"""Columns of an entry after its number, its time and its kind."""
_RENAMED_COLUMNS = {"place": "position", "oldest": "oldest_version", "newest": "newest_version"}
_KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "began": ("began", {"reason": "data"}),
    "baselines": ("baselines", {"reason": "data"}),
    "evaluated": ("evaluated", {"step": "version"}),
    "suspected": ("suspected", {"reason": "suspect"}),
    "cleared": ("cleared", {"reason": "suspect"}),
    "quarantined": ("quarantined", {"reason": "suspect"}),
    "sealed": ("closed", {"row": "num_rows", "place": "num_samples"}),
    "replayed": ("retrained", {}),
    "saved": ("saved", {"step": "version", "reason": "commit_id"}),
    "unsaved": ("unsaved", {"step": "version"}),
    "discarded": ("discarded", {"step": "version"}),
    "restarted": ("restarted", {"step": "version"}),
    "outlived": ("survived", {"step": "version"}),
    "issued": ("issued", {"newest": "version"}),
    "adopted": ("reattached", {}),
    "replied": ("observed", {"place": "turn"}),
    "flagged": ("early_stop", {"place": "prm_step", "reward": "score", "reason": "data"}),
    "followed": ("prm_scored", {}),
    "compared": ("group_scored", {}),
    "placed": ("assigned", {}),
}
"""By former kind: the present one, and columns that it names otherwise than the other kinds do."""
_RENAMED_SETTINGS = {
    "adds_greedy": "has_greedy_baseline",
    "follows_traces": "has_prm",
    "compares_siblings": "has_group_rewards",
    "stops_below": "early_stop_threshold",
}
"""Settings that an entry `began` holds for the checker."""
_RENAMED_FIELDS = {("Trajectory", "trains"): "loss_mask", ("ScoredTrajectory", "flag"): "early_stop"}
"""By message and former name: fields of what is recorded of prompts and trajectories."""
_RENAMED_MESSAGES = {"Flag": "EarlyStopDecision", "Scored": "Score"}


def read_events(old: sqlite3.Connection) -> Iterator[Row]:
    """Yield every entry, in order. Raises `LedgerError` for one that is not as it was written."""
    for *row, said in old.execute("SELECT * FROM events ORDER BY seq"):
        yield _checked(row, said, table="events")


def read_tables(old: sqlite3.Connection) -> dict[str, Iterable[Row]]:
    """Return the rows of every table but `events`. Raises `LedgerError` for one that is not as it was written."""
    return {table: _read(old, table) for table in _TABLES}


def renamed_event(row: Row) -> Row:
    """Return an entry as schema 4 has it."""
    sequence, seconds, kind, *values = row
    kind, names = _KINDS.get(kind, (kind, {}))
    named = {names.get(name, _RENAMED_COLUMNS.get(name, name)): value for name, value in zip(_COLUMNS, values, strict=True)}
    if kind == "began":
        data = json.loads(named["data"])
        settings = {_RENAMED_SETTINGS.get(name, name): value for name, value in data["settings"].items()}
        named["data"] = json.dumps(data | {"settings": settings})
    elif kind == "ended":
        data = json.loads(named["reason"])
        named |= {"reason": data["reason"], "data": json.dumps(data["counts"])}
    return sequence, seconds, kind, *values_of(Columns(**named))


def renamed_rows(table: str, rows: Iterable[Row]) -> tuple[str, Iterator[Row]]:
    """Return a table and its rows as schema 4 has them."""
    change = {"state": _renamed_state, "in_flight": _renamed_in_flight, "groups": _renamed_body, "trajectories": _renamed_body}
    return _RENAMED_TABLES.get(table, table), map(change.get(table, tuple), rows)


def _renamed_state(row: Row) -> Row:
    key, value = row
    return _RENAMED_STATE.get(key, key), value


def _renamed_in_flight(row: Row) -> Row:
    *known, early_stop, revives = row
    if early_stop is not None:
        attempt, decision = json.loads(early_stop)
        early_stop = json.dumps([attempt, decision | {"type": "EarlyStopDecision"}])
    return *known, early_stop, revives


def _renamed_body(row: Row) -> Row:
    """Rename the recorded message, which both tables have in their second column."""
    key, body, *rest = row
    return key, msgspec.msgpack.encode(_renamed_message(msgspec.msgpack.decode(body))), *rest


def _renamed_message(value: Any) -> Any:
    """Rename fields. Columns of tokens are extension types, which pass as they are; no `type` in a prompt's row is a message's."""
    if isinstance(value, list):
        return [_renamed_message(one) for one in value]
    if not isinstance(value, dict):
        return value
    message = str(value.get("type"))
    if message == "Prompt":
        return value
    changed = {_RENAMED_FIELDS.get((message, name), name): _renamed_message(one) for name, one in value.items()}
    return changed | {"type": _RENAMED_MESSAGES[message]} if message in _RENAMED_MESSAGES else changed


def _read(old: sqlite3.Connection, table: str) -> Iterator[Row]:
    return (_checked(row, said, table=table) for *row, said in old.execute(f"SELECT * FROM {table} ORDER BY rowid"))


def _checked(row: list[Any], said: int, *, table: str) -> Row:
    if said != (expected := checksum.of_row(row)):
        raise LedgerError(
            f"the ledger was damaged after it was written: the row {row[0]!r} of {table} has the checksum {expected}, expected {said}."
            " Restore it, with the checkpoints of the same moment"
        )
    return tuple(row)
