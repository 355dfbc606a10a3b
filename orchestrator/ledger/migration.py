"""`python -m orchestrator.ledger.migration RUN` brings a run folder of schema 2 to schema 3: it can then be resumed, checked and replayed.

Schema 2 had no checksums, and kept no state beside the history: a resumed run read all that had ever happened. What it found there is put
into tables of its own, by the very questions that it asked. Checksums are of what is found now: nobody can tell whether that was damaged
before. The old ledger stays beside the new one as `ledger.sqlite.schema-2`, and everything old is read before anything new takes its name;
a migration that was interrupted is begun again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from orchestrator.ledger.ledger import RUN_ENDED, count_death
from orchestrator.ledger.store import PAGE_BYTES, create, writing
from pipelinerl.config.file import load_run, write_run
from pipelinerl.errors import LedgerError, PipelineError
from pipelinerl.storage import checksum
from pipelinerl.storage.checkpoint_folder import MANIFEST, File, Manifest, write_manifest
from pipelinerl.storage.schema import OLDEST_MIGRATED, SCHEMA, refusal

_FATES = """
    SELECT rollout_id, kind, coalesce(reason, '') AS reason FROM events e
    WHERE rollout_id IS NOT NULL AND kind IN ('trained', 'filtered', 'stale', 'failed', 'cancelled') AND NOT EXISTS (
        SELECT 1 FROM events r WHERE r.rollout_id = e.rollout_id AND r.kind = 'revived' AND r.seq > e.seq)
"""


def migrate(run_folder: Path, *, say: Callable[[str], None] = print) -> bool:
    """Bring a run folder to the present schema; return whether there was anything to do. Raises `LedgerError`, `ConfigError`.

    Nobody may be running it meanwhile.
    """
    path = run_folder / "ledger.sqlite"
    if not path.is_file():
        raise LedgerError(f"no ledger at {path}: name the folder of a run")
    config = load_run(run_folder)
    with contextlib.closing(sqlite3.connect(path)) as old:
        (found,) = old.execute("PRAGMA user_version").fetchone()
        if found not in (OLDEST_MIGRATED, SCHEMA):
            raise LedgerError(refusal(found, what=str(path)))
        if found == SCHEMA and (run_folder / "config.json").read_text().find('"schema"') >= 0:
            return False
        for folder in sorted((run_folder / "checkpoints").glob("step-*")):
            if not folder.suffix and (folder / MANIFEST).is_file():
                _migrate_checkpoint(folder, say=say)
        if found == OLDEST_MIGRATED:
            old.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            _migrate_ledger(old, path, say=say)
    write_run(run_folder, config)  # the last to be done is what says that all is
    return True


def _migrate_checkpoint(folder: Path, *, say: Callable[[str], None]) -> None:
    """Give a checkpoint's files their checksums."""
    content: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    if "schema" in content:
        return
    for name, size in content["files"].items():
        if (found := (folder / name).stat().st_size) != size:
            raise LedgerError(f"{folder / name} has {found} bytes, expected {size}: remove {folder}, or restore it")
    content["files"] = {name: File(bytes=size, xxh3=checksum.of_file(folder / name)) for name, size in content["files"].items()}
    (folder / MANIFEST).rename(draft := folder / f"{MANIFEST}.schema-2")
    write_manifest(folder, Manifest(**content))
    draft.unlink()
    say(f"{folder.name}: checksums of {len(content['files'])} files")


def _migrate_ledger(old: sqlite3.Connection, path: Path, *, say: Callable[[str], None]) -> None:
    draft = path.with_name(path.name + ".draft")
    draft.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as new:
        new.create_function("row_checksum", -1, lambda *values: checksum.of_row(values), deterministic=True)
        new.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        (ledger_id,) = old.execute("SELECT id FROM ledger").fetchone()
        create(new, ledger_id=ledger_id)
        new.execute("BEGIN")
        events = old.execute("SELECT * FROM events ORDER BY seq")
        new.executemany(f"INSERT INTO events VALUES ({', '.join('?' * 17)})", ((*row, checksum.of_row(row)) for row in events))
        for table, rows in _tables(old).items():
            new.executemany(writing(table), rows)
        new.execute("COMMIT")
        (num_events,) = new.execute("SELECT count(*) FROM events").fetchone()
    shutil.copy2(path, path.with_name(f"{path.name}.schema-{OLDEST_MIGRATED}"))
    for left in (path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
        left.unlink(missing_ok=True)
    draft.rename(path)
    say(f"ledger.sqlite: {num_events:,} entries, from schema {OLDEST_MIGRATED} to {SCHEMA}")


def _tables(old: sqlite3.Connection) -> dict[str, Iterable[tuple[Any, ...]]]:
    """The rows of every table but `events`, from what schema 2 kept."""
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
    """The newest checkpoint: schema 2 kept the rows of no step before it."""
    return old.execute("SELECT coalesce(max(step), 0) FROM events WHERE kind = 'saved' AND rollout_id IS NULL").fetchone()[0]


def _counts(old: sqlite3.Connection) -> Iterable[tuple[str, str, int]]:
    return old.execute(f"SELECT kind, reason, count(*) FROM ({_FATES}) GROUP BY 1, 2")


def _in_flight(old: sqlite3.Connection) -> list[tuple[Any, ...]]:
    """What is in flight, and what was when its run ended, in the order in which it was admitted."""
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
        count_death(deaths, kind, peer=peer, row=row)
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


def main() -> None:
    """Migrate and say what was done. An error of our own tree prints as one message and exits with 1."""
    parser = argparse.ArgumentParser(prog="python -m orchestrator.ledger.migration", description=__doc__)
    parser.add_argument("run_folder", type=Path, help="run folder")
    run_folder = parser.parse_args().run_folder
    try:
        is_changed = migrate(run_folder)
    except PipelineError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"{run_folder} is of schema {SCHEMA}" + ("" if is_changed else " already"))


if __name__ == "__main__":
    main()
