"""Brings a run folder to the present schema: checkpoints' manifests, the ledger, and, as the last, the settings.

The old ledger stays beside the new one, as `ledger.sqlite.schema-N`, and everything old is read before anything new takes its name; a
migration that was interrupted is begun again. The journal keeps the names of its time: `pipelinerl.observe` reads them.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.ledger.events import NAMES
from orchestrator.ledger.migration import from_schema_2, from_schema_3
from orchestrator.ledger.store import PAGE_BYTES, create, writing
from pipelinerl.config.file import parse, read_settings, write_run
from pipelinerl.config.renamed import translate
from pipelinerl.errors import CheckpointDamaged, LedgerError
from pipelinerl.storage import checksum
from pipelinerl.storage.checkpoint_folder import File, Manifest, complete, read_content, write_manifest
from pipelinerl.storage.schema import SCHEMA, refusal

_READERS = {2: from_schema_2, 3: from_schema_3}


def migrate(run_folder: Path, *, say: Callable[[str], None] = print) -> bool:
    """Bring a run folder to the present schema; return whether there was anything to do. Raises `LedgerError`, `ConfigError`.

    Nobody may be running it meanwhile.
    """
    path = run_folder / "ledger.sqlite"
    if not path.is_file():
        raise LedgerError(f"no ledger at {path}: name the folder of a run")
    settings_schema, tree = read_settings(run_folder)
    translated = translate(tree)  # also of the present schema: keys are renamed between two schemas, too
    config = parse(translated, origin=str(run_folder / "config.json"), for_run=False)
    with contextlib.closing(sqlite3.connect(path)) as old:
        (found,) = old.execute("PRAGMA user_version").fetchone()
        for schema in (found, settings_schema):
            if schema not in (*_READERS, SCHEMA):
                raise LedgerError(refusal(schema, what=str(path)))
        if found == settings_schema == SCHEMA and translated == tree:
            return False
        for folder in complete(run_folder / "checkpoints"):
            _migrate_checkpoint(folder, say=say)
        if found != SCHEMA:
            old.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            _migrate_ledger(old, path, schema=found, say=say)
    write_run(run_folder, config)  # the last to be done is what says that all is
    return True


def _migrate_checkpoint(folder: Path, *, say: Callable[[str], None]) -> None:
    """Write a manifest anew; one of schema 2 has no checksums of its files yet. A damaged one is left for the trainer to set aside."""
    try:
        content = read_content(folder)
    except CheckpointDamaged as error:
        say(f"{folder.name} is left as it is: {error}")
        return
    schema: Any = content.pop("schema")
    if schema == SCHEMA:
        return
    if schema == 2:
        content["files"] = {name: _checked_file(folder, name, size) for name, size in content["files"].items()}
    write_manifest(folder, msgspec.convert(msgspec.to_builtins(content), Manifest))
    say(f"{folder.name}: manifest of {len(content['files'])} files, from schema {schema} to {SCHEMA}")


def _checked_file(folder: Path, name: str, size: int) -> File:
    if (found := (folder / name).stat().st_size) != size:
        raise LedgerError(f"{folder / name} has {found} bytes, expected {size}: remove {folder}, or restore it")
    return File(bytes=size, xxh3=checksum.of_file(folder / name))


def _migrate_ledger(old: sqlite3.Connection, path: Path, *, schema: int, say: Callable[[str], None]) -> None:
    reader = _READERS[schema]
    draft = path.with_name(path.name + ".draft")
    draft.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as new:
        new.create_function("row_checksum", -1, lambda *values: checksum.of_row(values), deterministic=True)
        new.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        (ledger_id,) = old.execute("SELECT id FROM ledger").fetchone()
        create(new, ledger_id=ledger_id)
        new.execute("BEGIN")
        events = map(from_schema_3.renamed_event, reader.read_events(old))
        marks = ", ".join("?" * (len(NAMES) + 4))
        new.executemany(f"INSERT INTO events VALUES ({marks})", ((*row, checksum.of_row(row)) for row in events))
        for former, former_rows in reader.read_tables(old).items():
            table, rows = from_schema_3.renamed_rows(former, former_rows)
            new.executemany(writing(table), rows)
        new.execute("COMMIT")
        (num_events,) = new.execute("SELECT count(*) FROM events").fetchone()
    shutil.copy2(path, path.with_name(f"{path.name}.schema-{schema}"))
    for left in (path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
        left.unlink(missing_ok=True)
    draft.rename(path)
    say(f"ledger.sqlite: {num_events:,} entries, from schema {schema} to {SCHEMA}")
