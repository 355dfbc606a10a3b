"""The command line as a user meets it: help that teaches, errors that say what to do, and a dry run that starts nothing."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from pipelinerl import __version__
from pipelinerl.__main__ import main
from pipelinerl.cli.entry import app
from pipelinerl.cli.modes import MODES, _possible, settings_of
from pipelinerl.config import EngineSection
from pipelinerl.config.file import load
from pipelinerl.launch.run_folder import make_run_folder
from pipelinerl.runtime.lease import held
from tests.observe.report.synthetic import write_run

CONFIG = """
[model]
path = "missing-model"
[data]
source = "missing.jsonl"
[[reward]]
function = "pipelinerl.rewards.functions.builtin:exact_match"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


def pipelinerl(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pipelinerl", *map(str, arguments)], capture_output=True, text=True, check=False, cwd=cwd)


def test_help_names_the_first_thing_to_do():
    shown = pipelinerl("--help")
    assert shown.returncode == 0
    for word in (
        "demo",
        "init",
        "run",
        "plan",
        "simulate",
        "sft",
        "report",
        "compare",
        "watch",
        "view",
        "track",
        "upload",
        "trace",
        "slurm",
        "k8s",
        "ray",
        "engines",
        "doctor",
        "algorithms",
        "keys",
    ):
        assert word in shown.stdout
    assert "Start here" in shown.stdout


def test_a_folder_that_is_no_run_is_named(tmp_path: Path):
    shown = pipelinerl("watch", tmp_path)
    assert shown.returncode == 1
    assert shown.stderr.startswith("DataError: no journal in")


def test_a_dry_run_prints_the_processes_and_starts_nothing(config: Path, tmp_path: Path):
    shown = pipelinerl("run", config, "engine.count=3", 'tracking.to=["wandb"]', "--dry-run", cwd=tmp_path)
    assert shown.returncode == 1, "what it would start cannot start: see tests/launch/test_preflight.py"
    assert "no folder at missing-model" in shown.stderr
    for role in ("orchestrator", "engines", "scorer-0", "trainer", "track-wandb"):
        assert role in shown.stdout
    assert '"count": 3' in shown.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_everything_wrong_before_the_start_is_said_at_once(config: Path, tmp_path: Path):
    shown = pipelinerl("run", config, "algorithm.name=grpoo", cwd=tmp_path)
    assert shown.returncode == 1
    assert "no folder at missing-model" in shown.stderr
    assert "did you mean 'grpo'" in shown.stderr
    assert "missing.jsonl cannot be read" in shown.stderr
    assert "Traceback" not in shown.stderr
    assert not (tmp_path / "runs").exists()


def test_an_unknown_key_is_answered_with_the_nearest(config: Path, tmp_path: Path):
    shown = pipelinerl("run", config, "trainer.stepz=3", cwd=tmp_path)
    assert shown.returncode == 1
    assert "did you mean trainer.steps?" in " ".join(shown.stderr.split())


def test_the_tables_print():
    assert "dapo" in pipelinerl("algorithms").stdout
    assert "pipeline.max_staleness" in pipelinerl("keys").stdout


def test_a_slurm_job_is_written_and_not_submitted_unless_asked(config: Path, tmp_path: Path):
    shown = pipelinerl("slurm", config, cwd=tmp_path)
    assert shown.returncode == 0
    (script,) = tmp_path.glob("runs/run-*/job.sbatch")
    assert "#SBATCH --requeue" in script.read_text()
    assert '"orchestrator"' in (script.parent / "roles.json").read_text()
    refused = pipelinerl("slurm", config, 'slurm.options=["--requeue"]', cwd=tmp_path)
    assert refused.returncode == 1
    assert "the script sets it itself" in refused.stderr


def test_a_tracker_that_is_unknown_is_told_before_anything_is_sent(config: Path, tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    shown = pipelinerl("track", tmp_path / "run", "--to", "wandbb")
    assert shown.returncode == 1
    assert "known are wandb, tensorboard, prometheus" in " ".join(shown.stderr.split())


@pytest.mark.parametrize(
    ("words", "resume"),
    [
        (["my.toml", "--resume"], ""),
        (["my.toml", "--resume", "trainer.steps=3"], ""),
        (["--resume", "my.toml"], ""),
        (["my.toml", "--resume", "--dry-run"], ""),
        (["my.toml", "--resume", "demo-20260101-120000", "trainer.steps=3"], "demo-20260101-120000"),
        (["my.toml", "--resume", "runs/demo-1"], "runs/demo-1"),
        (["my.toml"], None),
    ],
)
def test_resume_takes_the_name_of_a_run_or_none(words: list[str], resume: str | None):
    command = get_command(app)
    assert isinstance(command, TyperGroup)
    context = command.commands["run"].make_context("run", words)
    assert context.params["resume"] == resume
    assert str(context.params["config_file"]) == "my.toml"


def test_a_second_resume_of_a_live_run_is_refused_with_who_holds_it_and_touches_nothing(config: Path, tmp_path: Path):
    """Before anything else is looked at: the model of these settings is not even there."""
    run_folder = make_run_folder(load(config, overrides=[f"run.folder={tmp_path / 'runs'}"]))
    (run_folder / "checkpoints" / "step-000001").mkdir(parents=True)
    (run_folder / "checkpoints" / "step-000001" / "manifest.json").touch()
    (run_folder / "endpoints").mkdir()
    (run_folder / "endpoints" / "engine.json").touch()
    with held(run_folder):
        before = {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
        shown = pipelinerl("run", config, "--resume", run_folder.name, "trainer.steps=7", cwd=tmp_path)
    assert shown.returncode == 1
    assert re.search(rf"^LeaseError: .* is held by process {os.getpid()} on .*, since ", shown.stderr)
    after = {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
    assert after.keys() == before.keys()
    assert [path.name for path in after if after[path] != before[path]] in ([], ["lease.json"]), "its holder has let go since"


def test_who_interrupts_a_command_that_is_still_being_imported_sees_no_traceback():
    program = """
        import sys
        class Interrupts:
            def find_spec(self, name, path=None, target=None):
                if name == "pipelinerl.cli.runs":
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Interrupts())
        from pipelinerl.__main__ import main
        main()
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize(("words", "written"), [(("report", "--no-what-if"), "report.html"), (("trace",), "trace.json.gz")])
def test_what_is_written_is_named_in_one_line_as_it_stands(tmp_path: Path, words: tuple[str, ...], written: str):
    folder = tmp_path / f"[bold]-{'long' * 30}"
    write_run(folder)
    assert pipelinerl(*words, str(folder)).stdout.splitlines()[-1] == f"{words[0]}: {folder / written}"


def test_the_version_prints():
    assert pipelinerl("--version").stdout == f"pipelinerl {__version__}\n"


def test_a_shell_completes_the_commands():
    typed = {"_PIPELINERL_COMPLETE": "complete_bash", "COMP_WORDS": "pipelinerl re", "COMP_CWORD": "1"}  # what bash asks with
    program = Path(sys.executable).with_name("pipelinerl")
    shown = subprocess.run([program], env={**os.environ, **typed}, capture_output=True, text=True, check=True)
    assert sorted(shown.stdout.split()) == ["replay", "report"]


def test_a_disk_that_is_full_is_said_so_in_one_line(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def full(*words: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/runs/demo/config.json")

    monkeypatch.setattr("pipelinerl.cli.train.train", full)
    monkeypatch.setattr(sys, "argv", ["pipelinerl", "run", str(config)])
    with pytest.raises(SystemExit):
        main()
    said = " ".join(capsys.readouterr().err.split())
    assert said == "OSError: No space left on device: /runs/demo/config.json; make room there, and `--resume` goes on"


def test_the_settings_of_a_comparison_in_modes_are_of_no_other(tmp_path: Path):
    shown = pipelinerl("compare", tmp_path / "one", tmp_path / "two", "--seconds", "5")
    assert shown.returncode == 1
    assert "are of --modes, which runs a config" in " ".join(shown.stderr.split())


@pytest.mark.slow
def test_a_mode_whose_run_fails_is_named_with_the_end_of_its_log(config: Path, tmp_path: Path):
    shown = pipelinerl("compare", "--modes", config, "--steps", "3", cwd=tmp_path)
    assert shown.returncode == 1
    said = " ".join(shown.stderr.split())
    assert "PeerGone: mode sync ended with exit code 1" in said
    assert "no folder at missing-model" in said


def test_steps_of_a_comparison_in_modes_are_said_in_one_place(config: Path, tmp_path: Path):
    shown = pipelinerl("compare", "--modes", config, "trainer.steps=8", cwd=tmp_path)
    assert shown.returncode
    assert "leave trainer.steps out, and add --steps" in " ".join(shown.stderr.split())


def test_modes_that_a_config_does_not_allow_are_refused_before_anything_runs(config: Path, tmp_path: Path):
    shown = pipelinerl("compare", "--modes", config, "trainer.stepz=3", cwd=tmp_path)
    assert shown.returncode == 1
    assert "did you mean trainer.steps?" in " ".join(shown.stderr.split())
    assert not (tmp_path / "runs").exists()


def test_the_mixed_mode_takes_two_engines_and_has_half_of_them_in_turns(config: Path, capsys: pytest.CaptureFixture[str]):
    def settings(**sized: int) -> str:
        (own,) = (one for one in settings_of("mixed", EngineSection.model_validate(sized)) if "apart" in one)
        return own

    assert [settings(count=2), settings(count=5), settings(count=5, apart=4)] == ["engine.apart=1", "engine.apart=2", "engine.apart=4"]
    assert _possible(config, ["engine.count=2"], EngineSection.model_validate({"count": 2})) == list(MODES)
    assert _possible(config, [], EngineSection.model_validate({})) == [mode for mode in MODES if mode != "mixed"]
    assert "mixed is left out: " in capsys.readouterr().out
