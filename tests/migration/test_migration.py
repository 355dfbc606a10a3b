"""Runs as earlier versions left them, one finished and one stopped by Ctrl-C, made by those versions themselves: they go on.

Schema 2 is version 0.1.0's of early November 2026, schema 3 that of commit e5fd16d, with a run on simulated time, too, whose hopeless
rollouts were stopped early.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.migration.run_folder import migrate
from orchestrator.ledger.snapshot import read_snapshot, read_steps
from orchestrator.replay.__main__ import replay
from orchestrator.replay.recorded import read_prompts, read_recording
from pipelinerl.checker.history import open_history
from pipelinerl.checker.invariants import check_history
from pipelinerl.checker.state import RunState
from pipelinerl.config.file import load_run, parse
from pipelinerl.config.renamed import translate
from pipelinerl.errors import CheckpointDamaged, ConfigError, LedgerError
from pipelinerl.observe.lines import read_journals
from pipelinerl.observe.report import write_report
from pipelinerl.storage.checkpoint_folder import check_files, complete, read_manifest
from tests.warm_runs import Started

SCHEMAS = (2, 3)


@pytest.fixture(params=SCHEMAS)
def schema(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def runs(schema: int, tmp_path: Path) -> Path:
    """The folder with the runs `finished` and `stopped`, and their model; of schema 3 `simulated`, too."""
    return unpack(schema, tmp_path)


def unpack(schema: int, folder: Path) -> Path:
    with tarfile.open(Path(__file__).with_name(f"runs_of_schema_{schema}.tar.xz")) as tar:
        tar.extractall(folder, filter="data")
    for path in folder.glob("*/config.json"):
        settings = json.loads(path.read_text().replace('"/runs', f'"{folder}'))
        settings.pop("checksum", None)  # as of a file that a person changed
        path.write_text(json.dumps(settings))
    return folder


def checked(run_folder: Path, *, with_checkpoints: bool = True) -> RunState:
    with open_history(run_folder) as history:
        return check_history(history, with_checkpoints=with_checkpoints)


def rows_of(run_folder: Path, query: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(run_folder / "ledger.sqlite")) as database:
        return database.execute(query).fetchall()


def test_an_older_run_is_refused_with_what_to_do(runs: Path, schema: int):
    says = rf"its schema is {schema}, this one reads 4. .* `pipelinerl migrate RUN`"
    with pytest.raises(LedgerError, match=says):
        Ledger(runs / "stopped" / "ledger.sqlite")
    with pytest.raises(ConfigError, match=says):
        read_manifest(complete(runs / "stopped" / "checkpoints")[-1])
    with pytest.raises(ConfigError, match=says):
        load_run(runs / "stopped")
    with pytest.raises(ValueError, match="bring the run up to date with `pipelinerl migrate`"):
        checked(runs / "stopped")


NUM_STEPS = {(2, "finished"): 4, (2, "stopped"): 14, (3, "finished"): 4, (3, "stopped"): 10}


@pytest.mark.parametrize("name", ["finished", "stopped"])
def test_a_migrated_run_is_checked_and_goes_on(runs: Path, schema: int, name: str):
    folder, num_steps = runs / name, NUM_STEPS[schema, name]
    fates = "SELECT rollout_id, fate, reason, step, reward, oldest_version, newest_version, num_tokens, admitted_s, ended_s FROM fates"
    before = {query: rows_of(folder, query) for query in ("SELECT * FROM events", fates, "SELECT * FROM settled")}
    old_events, old_fates, old_settled = before.values()
    tree = json.loads((folder / "config.json").read_text())
    assert migrate(folder, say=lambda line: None)
    tree.pop("schema", None)
    assert load_run(folder) == parse(translate(tree), origin="test")
    checker = checked(folder)
    assert checker.problems == []
    assert (checker.num_done, checker.counts()["trained"]) == (num_steps, 16 * num_steps)
    (checkpoint,) = complete(folder / "checkpoints")
    manifest = read_manifest(checkpoint)
    check_files(checkpoint, manifest)
    assert manifest.num_samples == 16 * num_steps
    with contextlib.closing(Ledger(folder / "ledger.sqlite")) as ledger:
        assert ledger.store.read("SELECT seq, t, rollout_id, group_id FROM events") == [(*row[:2], *row[3:5]) for row in old_events]
        assert ledger.store.read(fates.replace("fate,", "status,").replace("fates", "ended_rollouts")) == old_fates
        counts = ledger.counts()
        assert (counts.in_flight, counts.admitted) == (0, len({row[3] for row in old_events if row[3]}))
        settings = json.loads(ledger.store.read("SELECT data FROM events WHERE kind = 'began'")[0][0])["settings"]
        ledger.begin(settings, now_s=1e6, unix_s=0.0)
        snapshot = read_snapshot(ledger)
        assert (snapshot.num_done, snapshot.num_assigned_groups) == (num_steps, len([row for row in old_settled if row[3]]))
        revived = [one for group in snapshot.interrupted for one in group.rollouts]
        assigned = sum(len(step.samples) for step in snapshot.steps.values())
        assert len(revived) + len(snapshot.scored) + assigned == counts.cancelled
        assert sorted(read_steps(ledger, first=num_steps)) == [step for step in snapshot.steps if snapshot.steps[step].num_groups]
    assert checked(folder).problems == []
    assert len(read_prompts(folder / "ledger.sqlite")) == max(row[4] or 0 for row in old_events) + 1
    assert read_recording(folder / "ledger.sqlite").num_completed == len(old_settled)
    assert not migrate(folder), "there is nothing left to do"


def test_what_a_prm_and_early_stops_left_is_under_its_new_names_and_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = unpack(3, tmp_path) / "simulated"
    flagged = rows_of(folder, "SELECT place, reward, reason FROM events WHERE kind = 'flagged'")
    sealed = rows_of(folder, "SELECT step, row, place, num_tokens FROM events WHERE kind = 'sealed'")
    saved = rows_of(folder, "SELECT step, reason FROM events WHERE kind = 'saved'")
    migrate(folder, say=lambda line: None)
    assert rows_of(folder, "SELECT prm_step, score, data FROM events WHERE kind = 'early_stop'") == flagged
    assert rows_of(folder, "SELECT step, num_rows, num_samples, num_tokens FROM events WHERE kind = 'closed'") == sealed
    assert rows_of(folder, "SELECT version, commit_id FROM events WHERE kind = 'saved'") == saved
    misplaced = "row IS NOT NULL OR position IS NOT NULL OR reward IS NOT NULL OR reason IS NOT NULL"
    kinds = "('closed', 'early_stop', 'saved', 'began', 'done')"
    assert rows_of(folder, f"SELECT * FROM events WHERE kind IN {kinds} AND ({misplaced})") == []
    assert checked(folder, with_checkpoints=False).problems == []
    members = [member for group in read_recording(folder / "ledger.sqlite").groups for member in group.members]
    assert sum(member.early_stop is not None for member in members) == len(flagged)
    assert all(member.trajectory.loss_mask.any() for member in members if member.score.reward is not None)
    replay(folder, stages=["generation", "prm", "training", "weight_sync"], overrides=[])
    said = capsys.readouterr().out
    assert "0 of another, 0 not asked for" in said
    assert "0 are stopped that were not, 0 were and are not, 0 have other step scores" in said
    assert "0 differ from what batching recorded" in said
    assert "0 engines differ" in said


def test_a_damaged_row_is_not_given_a_checksum(tmp_path: Path):
    folder = unpack(3, tmp_path) / "stopped"
    with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as database, database:
        database.execute("UPDATE settled SET step = step + 1 WHERE number = 3")
    with pytest.raises(LedgerError, match="the row 3 of settled has the checksum"):
        migrate(folder, say=lambda line: None)
    assert rows_of(folder, "PRAGMA user_version") == [(3,)], "it is as it was"


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
    (folder / "config.json").write_text(settings)
    assert migrate(folder, say=lambda line: None), "the settings are not done"
    assert checked(folder).problems == []
    (folder / "ledger.sqlite").write_bytes(ledger)  # the checkpoint is done, the rest is not
    (folder / "config.json").write_text(settings)
    assert migrate(folder, say=lambda line: None)
    assert checked(folder).problems == []
    assert not migrate(folder)


def test_a_key_that_was_renamed_since_is_translated_in_a_folder_of_the_present_schema(runs: Path):
    folder = runs / "finished"
    migrate(folder, say=lambda line: None)
    tree = json.loads((folder / "config.json").read_text())
    del tree["checksum"]
    tree["slurm"]["again"] = tree["slurm"].pop("at_limit")
    (folder / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=r"slurm\.again is now called slurm\.at_limit"):
        load_run(folder)
    assert migrate(folder, say=lambda line: None)
    assert "at_limit" in load_run(folder).slurm.model_dump()
    assert not migrate(folder)


@pytest.mark.parametrize("what", ["ledger", "settings"])
def test_a_later_schema_is_refused_with_both_numbers(runs: Path, what: str):
    folder = runs / "finished"
    migrate(folder, say=lambda line: None)
    if what == "ledger":
        with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as database:
            database.execute("PRAGMA user_version = 9")
    else:
        (folder / "config.json").write_text((folder / "config.json").read_text().replace('"schema": 4', '"schema": 9'))
    with pytest.raises((ConfigError, LedgerError), match=r"its schema is 9, this version \(0.1.0\) reads 4"):
        migrate(folder)


@pytest.mark.slow
def test_the_command_line_says_what_it_did(tmp_path: Path):
    runs = unpack(2, tmp_path)
    command = [sys.executable, "-m", "pipelinerl", "migrate", str(runs / "stopped")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "step-000014: manifest of 2 files, from schema 2 to 4" in said
    assert "1,648 entries, from schema 2 to 4" in said
    assert "stopped is of schema 4" in said
    assert (runs / "stopped" / "ledger.sqlite.schema-2").exists()


def test_a_migrated_runs_weights_moments_and_journal_are_read(runs: Path, schema: int):
    import torch

    from tests.trainer.tiny import make_model, make_step
    from trainer.checkpoint.checkpoints import Checkpoints
    from trainer.checkpoint.portable import state_of

    folder, num_done = runs / "stopped", NUM_STEPS[schema, "stopped"]
    migrate(folder, say=lambda line: None)
    config = load_run(folder)
    model = make_model(config.model.path, dtype=config.model.dtype)
    _, optimizer = make_step(model)
    before = {name: tensor.clone() for name, tensor in state_of(model, optimizer)["model"].items()}
    state = Checkpoints(folder / "checkpoints", state=lambda: state_of(model, optimizer), rank=0, num_ranks=1, keep=1)
    restored = state.restore()
    assert restored is not None
    assert restored.version == num_done
    after = state_of(model, optimizer)
    assert any(not torch.equal(before[name], tensor) for name, tensor in after["model"].items())
    assert any(tensor.any() for name, tensor in after["optimizer"].items() if name.endswith("exp_avg"))
    assert [line["step"] for line in read_journals(folder) if line["kind"] == "step"] == list(range(num_done))
    assert write_report(folder).stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_migrated_run_resumes_with_the_present_program(tmp_path: Path, started_warm: Started):
    """The real engine, trainer and scorer go on where Ctrl-C left the oldest program; journals of both are read as one."""
    runs, num_done = unpack(2, tmp_path), NUM_STEPS[2, "stopped"]
    folder = runs / "stopped"
    migrate(folder, say=lambda line: None)
    settings = runs / "settings.toml"
    settings.write_text(toml(load_run(folder).model_dump(mode="json", exclude_none=True)))
    code, printed = started_warm("run", settings, "--resume", folder, f"trainer.steps={num_done + 2}")
    assert code == 0, printed
    checker = checked(folder)
    assert checker.problems == []
    assert (checker.num_done, checker.num_starts, checker.num_retrained) == (num_done + 2, 2, 0)
    steps = [line["step"] for line in read_journals(folder) if line["kind"] == "step"]
    assert steps == list(range(num_done + 2))
    assert (folder / "report.html").exists()


def toml(tree: dict[str, Any]) -> str:
    """A section for each part of the settings, everything within on one line."""
    return "\n".join(f"{section} = {_value(content)}" for section, content in tree.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_value(one)}" for name, one in value.items()) + "}"
    return f"[{', '.join(map(_value, value))}]" if isinstance(value, list) else json.dumps(value)
