"""Runs as version 0.1.0 left them in schema 2, one finished and one stopped by Ctrl-C, made by that version itself: they go on."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.migration import migrate
from orchestrator.ledger.snapshot import read_snapshot, read_steps
from orchestrator.replay.recorded import read_drawn, read_recording
from pipelinerl.checker.history import open_history
from pipelinerl.checker.invariants import Checker, check_history
from pipelinerl.config.file import load_run
from pipelinerl.errors import CheckpointDamaged, ConfigError, LedgerError
from pipelinerl.storage.checkpoint_folder import check_files, complete, read_manifest

FIXTURE = Path(__file__).with_name("runs_of_schema_2.tar.xz")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder with the runs `finished` and `stopped`, and their model."""
    with tarfile.open(FIXTURE) as tar:
        tar.extractall(tmp_path, filter="data")
    for path in tmp_path.glob("*/config.json"):
        path.write_text(path.read_text().replace('"/runs', f'"{tmp_path}'))
    return tmp_path


def checked(run_folder: Path) -> Checker:
    with open_history(run_folder) as history:
        return check_history(history)


def test_a_run_of_schema_2_is_refused_with_what_to_do(runs: Path):
    with pytest.raises(LedgerError, match=r"its schema is 2, this one reads 3. .* `pipelinerl migrate RUN`"):
        Ledger(runs / "stopped" / "ledger.sqlite")
    with pytest.raises(ConfigError, match=r"its schema is 2, this one reads 3. .* `pipelinerl migrate RUN`"):
        read_manifest(complete(runs / "stopped" / "checkpoints")[-1])
    with pytest.raises(ValueError, match="bring the run up to date with `pipelinerl migrate`"):
        checked(runs / "stopped")


@pytest.mark.parametrize(("name", "num_steps", "num_trained"), [("finished", 4, 64), ("stopped", 14, 224)])
def test_a_migrated_run_is_checked_and_goes_on(runs: Path, name: str, num_steps: int, num_trained: int):
    folder = runs / name
    with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as database:
        before = {table: database.execute(f"SELECT * FROM {table}").fetchall() for table in ("events", "fates", "settled")}
    config = load_run(folder)
    assert migrate(folder, say=lambda line: None)
    assert load_run(folder) == config
    checker = checked(folder)
    assert checker.problems == []
    assert (checker.num_done, checker.counts()["trained"]) == (num_steps, num_trained)
    (checkpoint,) = complete(folder / "checkpoints")
    manifest = read_manifest(checkpoint)
    check_files(checkpoint, manifest)
    assert manifest.num_samples == num_trained
    with contextlib.closing(Ledger(folder / "ledger.sqlite")) as ledger:
        assert [row[:-1] for row in ledger.store.read("SELECT * FROM events")] == before["events"]
        assert ledger.terminal_statuses() == before["fates"]
        identity = ledger.counts()
        assert (identity.in_flight, identity.admitted) == (0, len({row[3] for row in before["events"] if row[3]}))
        ledger.begin(json.loads(before["events"][0][11])["settings"], now_s=1e6, unix_s=0.0)
        snapshot = read_snapshot(ledger)
        assert (snapshot.num_done, snapshot.num_assigned_groups) == (num_steps, 4 * num_steps)
        revived = [one for group in snapshot.interrupted for one in group.rollouts]
        assert num_steps not in snapshot.steps, "nothing was placed in a step that is not done"
        assert len(revived) + len(snapshot.scored) == identity.cancelled
        assert sorted(read_steps(ledger, first=num_steps)) == [step for step in snapshot.steps if snapshot.steps[step].num_groups]
    assert checked(folder).problems == []
    assert len(read_drawn(folder / "ledger.sqlite")) == max(row[4] or 0 for row in before["events"]) + 1
    assert read_recording(folder / "ledger.sqlite").num_completed == len(before["settled"])
    assert not migrate(folder), "there is nothing left to do"


def test_a_damaged_checkpoint_is_found_after_the_migration(runs: Path):
    migrate(runs / "finished", say=lambda line: None)
    (checkpoint,) = complete(runs / "finished" / "checkpoints")
    data = checkpoint / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[100_000] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=r"__0_0\.distcp was damaged"):
        check_files(checkpoint, read_manifest(checkpoint))


def test_an_interrupted_migration_is_begun_again(runs: Path):
    folder = runs / "stopped"
    (folder / "ledger.sqlite.draft").write_bytes(b"half of it")
    ledger = (folder / "ledger.sqlite").read_bytes()
    settings = (folder / "config.json").read_text()
    migrate(folder, say=lambda line: None)
    (folder / "ledger.sqlite").write_bytes(ledger)  # the checkpoint is done, the rest is not
    (folder / "config.json").write_text(settings)
    migrate(folder, say=lambda line: None)
    assert checked(folder).problems == []


@pytest.mark.parametrize("what", ["ledger", "settings"])
def test_a_later_schema_is_refused_with_both_numbers(runs: Path, what: str):
    folder = runs / "finished"
    migrate(folder, say=lambda line: None)
    if what == "ledger":
        with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as database:
            database.execute("PRAGMA user_version = 9")
    else:
        (folder / "config.json").write_text((folder / "config.json").read_text().replace('"schema": 3', '"schema": 9'))
    with pytest.raises((ConfigError, LedgerError), match=r"its schema is 9, this version \(0.1.0\) reads 3"):
        migrate(folder)


@pytest.mark.slow
def test_the_command_line_says_what_it_did(runs: Path):
    command = [sys.executable, "-m", "pipelinerl", "migrate", str(runs / "stopped")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "step-000014: checksums of 2 files" in said
    assert "1,648 entries, from schema 2 to 3" in said
    assert "stopped is of schema 3" in said
    assert (runs / "stopped" / "ledger.sqlite.schema-2").exists()
