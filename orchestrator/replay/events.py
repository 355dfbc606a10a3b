"""The events of a run from its ledger and its journal, on one clock, in their order, for the stages that wait for engines and trainer.

A run that was resumed is read up to its first restart: the state that it went on with is recorded nowhere.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from orchestrator.ledger.events import NAMES
from orchestrator.replay.recorded import open_ledger
from pipelinerl.errors import LedgerError
from pipelinerl.observe.lines import read_journal

TURN_S = 0.002
"""A stage hears everything at once that arrives within so short a time without an answer in between, as in one turn of the orchestrator's
loop. A larger value would have it answer later than it did; a smaller one would have it answer to half of what it knew.
"""
_APART_S = 5e-6
"""The time between two turns; several times the resolution of simulated time."""
_COLUMNS = ("t", "kind", *NAMES)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A line of the journal, or an entry of the ledger."""

    t: float
    """Seconds since the run began."""
    kind: str
    fields: dict[str, Any]


def read_events(run_folder: Path, *, kinds: Collection[str]) -> list[Event]:
    """Return the entries of these kinds, up to a run's first restart. Raises `LedgerError` where nothing or too little is recorded."""
    began, ended, entries = _read_ledger(run_folder, kinds)
    journal = run_folder / "journal" / "orchestrator.jsonl"
    lines = [line for line in read_journal(journal) if line["t"] < ended]
    if lines and not any(line["kind"] == "joined" for line in lines):
        raise LedgerError(f"{journal} says nothing of engines that joined: it was recorded by an earlier version, or no engine came")
    entries = [(line["t"], str(line["kind"]), line) for line in lines if line["kind"] in kinds] + entries
    entries.sort(key=lambda entry: entry[0])
    return [Event(t=t - began, kind=kind, fields=fields) for t, kind, fields in entries]


def in_turns(events: list[Event], *, answers: Collection[str]) -> Iterator[Event]:
    """Yield the events that a stage heard, each with the time of its turn; `answers` are the stage's own, and are left out."""
    turn: list[Event] = []
    last = -1.0
    for event in [*events, None]:
        if turn and (event is None or event.kind in answers or event.t - turn[0].t > TURN_S):
            last = max(turn[-1].t, last + _APART_S)
            yield from (dataclasses.replace(each, t=last) for each in turn)
            turn = []
        if event is not None and event.kind not in answers:
            turn.append(event)


def _read_ledger(run_folder: Path, kinds: Collection[str]) -> tuple[float, float, list[tuple[float, str, dict[str, Any]]]]:
    """Return the run's begin and its first restart, in Unix seconds, and the ledger's entries in between."""
    with open_ledger(run_folder / "ledger.sqlite") as database:
        starts = database.execute("SELECT seq, t, data FROM events WHERE kind = 'began' AND rollout_id IS NULL ORDER BY seq").fetchall()
        if not starts:
            raise LedgerError(f"{run_folder} has no recorded entry: its run has not begun")
        unix_s = [json.loads(data)["unix_s"] for _, _, data in starts]
        offset = unix_s[0] - starts[0][1]
        marks = ", ".join("?" * len(kinds))
        query = f"SELECT {', '.join(_COLUMNS)} FROM events WHERE kind IN ({marks}) AND seq < ? ORDER BY seq"
        found = database.execute(query, (*kinds, starts[1][0] if len(starts) > 1 else 2**62))
        entries = [(row[0] + offset, row[1], dict(zip(_COLUMNS, row, strict=True))) for row in found]
    return unix_s[0], unix_s[1] if len(unix_s) > 1 else float("inf"), entries
