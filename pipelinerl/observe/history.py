"""The content of a run's ledger, for a person: terminal statuses by reason, and the way of one prompt or rollout, entry by entry.

Reads `ledger.sqlite` as anyone with sqlite3 could, also while the run goes on; its columns are explained in `orchestrator.ledger.events`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from pipelinerl.errors import LedgerError

_SAID = {
    "admitted": "admitted",
    "issued": "asked of {peer}, which sampled under version {version}",
    "reattached": "still in {peer}, which survived the orchestrator",
    "held": "held by the script, which went on",
    "observed": "turn {turn}, by {peer}; the environment: {reason}",
    "lost": "attempt {attempt} lost: {reason}",
    "generated": "{num_tokens} tokens, versions {oldest_version} to {newest_version}, finished by {reason}",
    "scored": "scored: {reason}, reward {reward}",
    "assigned": "assigned to step {step}",
    "packed": "row {row}, position {position} of step {step}",
    "trained": "TRAINED in step {step}",
    "revived": "in flight again: the run goes on",
}


def summary_of(run_folder: Path) -> Iterator[str]:
    """Terminal statuses by reason, and what happened to the run as a whole."""
    with _open(run_folder) as database:
        yield "rollouts  status"
        for status, reason, count in database.execute("SELECT status, reason, count(*) FROM ended_rollouts GROUP BY 1, 2 ORDER BY 3 DESC"):
            yield f"{count:>8,}  {status}{': ' + reason if reason else ''}"
        num_open = "SELECT count(*) FROM events WHERE kind = 'admitted' AND rollout_id NOT IN (SELECT rollout_id FROM ended_rollouts)"
        yield f"{database.execute(num_open).fetchone()[0]:>8,}  in flight"
        yield "\n   times  what happened to the run"
        runs = "SELECT kind, count(*) FROM events WHERE rollout_id IS NULL GROUP BY kind ORDER BY min(seq)"
        for kind, count in database.execute(runs):
            yield f"{count:>8,}  {kind}"
        attempts = "SELECT reason, count(*) FROM events WHERE kind = 'lost' AND rollout_id IS NOT NULL GROUP BY reason ORDER BY 2 DESC"
        for reason, count in database.execute(attempts):
            yield f"{count:>8,}  attempts lost: {reason}"


def story_of(run_folder: Path, name: str) -> Iterator[str]:
    """Everything that happened to a prompt's rollouts (`epoch:row`), or to one rollout (`group/sibling`). Raises `LedgerError`."""
    column = "rollout_id" if "/" in name else "prompt_id"
    with _open(run_folder) as database:
        query = f"SELECT rollout_id FROM events WHERE kind = 'admitted' AND {column} = ? ORDER BY seq"
        rollouts = [rollout_id for (rollout_id,) in database.execute(query, (name,))]
        row = name.rpartition(":")[2]
        about = "SELECT seq, kind, peer, prompt_id FROM events WHERE rollout_id IS NULL AND (suspect = ? OR prompt_id = ?) ORDER BY seq"
        entries = [
            entry for entry in database.execute(about, (row, name)) if entry[1] in ("suspected", "cleared", "quarantined", "skipped")
        ]
        if not rollouts and not entries:
            raise LedgerError(f"no {'rollout' if '/' in name else 'prompt'} {name!r} in {run_folder}: it was not admitted (yet)")
        for seq, kind, peer, _ in entries:
            yield f"entry {seq}: row {row} {kind}" + (f" when {peer} ended" if kind in ("suspected", "quarantined") else "")
        clocks = _clocks(database)
        for rollout_id in rollouts:
            yield f"rollout {rollout_id}"
            yield from _story(database, rollout_id, clocks)


def _story(database: sqlite3.Connection, rollout_id: str, clocks: list[tuple[int, float]]) -> Iterator[str]:
    names = "seq, t, kind, attempt, step, row, position, turn, peer, reason, reward, version, oldest_version, newest_version, num_tokens"
    for values in database.execute(f"SELECT {names} FROM events WHERE rollout_id = ? ORDER BY seq", (rollout_id,)):
        entry = dict(zip(names.split(", "), values, strict=True))
        offset = next(offset for seq, offset in reversed(clocks) if seq <= entry["seq"])
        when = datetime.datetime.fromtimestamp(entry["t"] + offset).strftime("%m-%d %H:%M:%S.%f")[:-3]
        attempt = f" [{entry['attempt']}]" if entry["attempt"] is not None else ""
        kind = str(entry["kind"])
        said = _SAID.get(kind, kind.upper() + ": {reason}").format(**entry)
        yield f"  {when}{attempt} {said}"


def _clocks(database: sqlite3.Connection) -> list[tuple[int, float]]:
    """The first entry of each start, and what to add to its times to get Unix seconds."""
    starts = database.execute("SELECT seq, t, data FROM events WHERE kind = 'began' AND rollout_id IS NULL ORDER BY seq")
    return [(0, 0.0)] + [(seq, json.loads(data)["unix_s"] - t) for seq, t, data in starts]


@contextlib.contextmanager
def _open(run_folder: Path) -> Iterator[sqlite3.Connection]:
    path = run_folder / "ledger.sqlite"
    if not path.is_file():
        raise LedgerError(f"no ledger at {path}: name the folder of a run")
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        try:
            yield database
        except sqlite3.Error as error:
            raise LedgerError(f"{path} cannot be read: {error}. It was damaged after it was written: restore it") from error
