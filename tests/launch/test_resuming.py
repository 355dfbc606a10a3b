"""Which run `--resume` means, and what is refused before anything of it is touched."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from orchestrator.ledger.ledger import Ledger
from pipelinerl.config import Config
from pipelinerl.config.file import load_run, parse
from pipelinerl.errors import ConfigError
from pipelinerl.launch.resuming import find_run, has_begun, make_ready
from pipelinerl.launch.run_folder import make_run_folder


def settings(folder: Path, *, name: str = "demo") -> Config:
    return parse(
        {
            "run": {"name": name, "folder": str(folder)},
            "model": {"path": "m"},
            "data": {"source": "d"},
            "reward": [{"function": "f:g"}],
        },
        origin="here",
    )


def run_folder(config: Config, *, admitted: bool = False, checkpoint: bool = False, at_s: int = 0) -> Path:
    """A run's folder, last written at that instant."""
    folder = make_run_folder(config)
    Ledger(folder / "ledger.sqlite").store.close()
    if admitted:
        with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger, ledger:
            ledger.execute("INSERT INTO events (seq, t, kind, rollout_id, checksum) VALUES (1, 0.0, 'admitted', '0/0', 0)")
    if checkpoint:
        (folder / "checkpoints" / "step-000001").mkdir(parents=True)
        (folder / "checkpoints" / "step-000001" / "manifest.json").touch()
    for path in folder.glob("*"):
        os.utime(path, (at_s, at_s))
    return folder


def test_the_newest_run_that_really_began_is_taken_and_failed_starts_are_passed_over(tmp_path: Path):
    config = settings(tmp_path)
    assert find_run(config) is None
    run_folder(config, at_s=4)
    assert find_run(config) is None, "a start that failed is nothing to go on with"
    older, began = run_folder(config, checkpoint=True, at_s=1), run_folder(config, admitted=True, at_s=2)
    make_run_folder(config)  # newer than all, and without a ledger
    found = find_run(config)
    assert found is not None
    assert found.folder == began
    assert str(found) == f"{began}, going on (2 newer starts of that name never began)"
    assert has_begun(older)


@pytest.mark.parametrize("by", ["name", "folder"])
def test_a_run_is_named_by_its_folder_or_its_name(tmp_path: Path, by: str):
    config = settings(tmp_path)
    older = run_folder(config, admitted=True, at_s=1)
    run_folder(config, admitted=True, at_s=2)
    found = find_run(config, older.name if by == "name" else str(older))
    assert found is not None
    assert found.folder == older


def test_a_name_that_no_run_has_is_answered_with_those_there_are(tmp_path: Path):
    config = settings(tmp_path)
    known = run_folder(config, admitted=True)
    with pytest.raises(ConfigError, match=rf"--resume dmo: no run is there, neither at dmo nor at .*; the newest in .* are {known.name}"):
        find_run(config, "dmo")


def test_a_model_beside_the_runs_is_not_offered_as_one(tmp_path: Path):
    config = settings(tmp_path)
    known = run_folder(config, admitted=True)
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"the newest in .* are {known.name}$"):
        find_run(config, "dmo")


@pytest.mark.parametrize("name", ["demo", "demo-2", "lr[3e-4]", "a*", "a.b", "with space"])
def test_a_run_is_never_taken_for_one_of_a_longer_name(tmp_path: Path, name: str):
    config = settings(tmp_path, name=name)
    mine = run_folder(config, admitted=True, at_s=1)
    again = run_folder(config, admitted=True, at_s=2)
    for longer in (f"{name}-2", f"{name}-20260101", name.replace("*", "bc"), name.replace(".", "x")):
        if longer != name:
            run_folder(settings(tmp_path, name=longer), admitted=True, at_s=3)
    found = find_run(config)
    assert found is not None
    assert found.folder == again, f"{mine} and {again} are those of that name"


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipelinerl.launch.run_folder.name_now", lambda config: "demo-20260101-000000")
    config = settings(tmp_path)
    first, second, third = (make_run_folder(config).name for _ in range(3))
    assert (first, second, third) == ("demo-20260101-000000", "demo-20260101-000000-2", "demo-20260101-000000-3")
    shutil.rmtree(tmp_path / second)
    assert make_run_folder(config).name == second, "a number that is taken is passed over, not counted"


def test_a_named_run_that_never_began_is_refused(tmp_path: Path):
    config = settings(tmp_path)
    with pytest.raises(ConfigError, match="that run never began: it has no checkpoint and admitted no rollout"):
        find_run(config, run_folder(config).name)


def test_a_damaged_ledger_is_no_reason_to_pass_a_run_over(tmp_path: Path):
    config = settings(tmp_path)
    folder = make_run_folder(config)
    (folder / "ledger.sqlite").write_bytes(b"no database at all" * 100)
    found = find_run(config)
    assert found is not None, "resuming it says what is wrong; silence would begin another run"


def test_a_run_is_made_ready_with_the_present_settings(tmp_path: Path):
    config = settings(tmp_path)
    folder = run_folder(config, admitted=True)
    (folder / "endpoints").mkdir()
    (folder / "endpoints" / "engine.json").touch()
    longer = config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": 777})})
    make_ready(longer, folder)
    assert load_run(folder).trainer.steps == 777
    assert not list((folder / "endpoints").iterdir())


def test_fewer_steps_than_were_trained_are_refused_and_as_many_are_not(tmp_path: Path):
    config = settings(tmp_path)
    folder = run_folder(config)
    with contextlib.closing(Ledger(folder / "ledger.sqlite")) as ledger:
        for step in range(3):
            ledger.record("done", now_s=0.0, step=step)
    fewer, as_many = (config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": steps})}) for steps in (2, 3))
    with pytest.raises(ConfigError, match=r"trainer\.steps is 2, and .* has trained 3: raise it, or start a new run"):
        make_ready(fewer, folder)
    make_ready(as_many, folder)


def test_settings_that_the_ledger_does_not_fit_are_refused_by_name(tmp_path: Path):
    config = settings(tmp_path)
    folder = run_folder(config, admitted=True)
    other = config.model_copy(update={"rollout": config.rollout.model_copy(update={"group_size": 3})})
    with pytest.raises(ConfigError, match=r"rollout.group_size was 8, and is 3"):
        make_ready(other, folder)
    remax = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"name": "remax"})})
    with pytest.raises(ConfigError, match=r"algorithm.name was 'grpo', and is 'remax'"):
        make_ready(remax, folder)
    make_ready(config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"name": "rloo"})}), folder)


@pytest.mark.parametrize(
    ("section", "changes", "says"),
    [
        ("data", {"prompt_column": "question"}, "data.prompt_column was 'prompt', and is 'question'"),
        ("data", {"chat": True}, "data.chat was False, and is True"),
        ("data", {"system_prompt": "Be brief."}, "data.system_prompt was None, and is 'Be brief.'"),
        ("data", {"tools": "tools"}, "data.tools was None, and is 'tools'"),
        (
            "data",
            {"chat_template_kwargs": {"enable_thinking": False}},
            "data.chat_template_kwargs was {}, and is {'enable_thinking': False}",
        ),
        ("rollout", {"temperature": 0.5}, "rollout.temperature was 1.0, and is 0.5"),
        ("rollout", {"stop": ("</answer>",)}, "rollout.stop was (), and is ('</answer>',)"),
        ("rollout", {"stop_token_ids": (2,)}, "rollout.stop_token_ids was (), and is (2,)"),
        ("sft_stream", {"source": "a.jsonl"}, "sft_stream.source was None, and is 'a.jsonl'"),
        ("sft_stream", {"batch_size": 8}, "sft_stream.batch_size was 32, and is 8"),
        ("sft", {"completion_column": "answer"}, "sft.completion_column was 'completion', and is 'answer'"),
    ],
)
def test_what_a_prompt_and_the_end_of_a_completion_are_cannot_change(tmp_path: Path, section: str, changes: dict[str, Any], says: str):
    config = settings(tmp_path)
    folder = run_folder(config, admitted=True)
    other = config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})
    with pytest.raises(ConfigError, match=re.escape(says)):
        make_ready(other, folder)
    assert load_run(folder) == config, "nothing was written"
    make_ready(config, folder)


def test_what_may_change_is_taken_over(tmp_path: Path):
    config = settings(tmp_path)
    folder = run_folder(config, admitted=True)
    other = config.model_copy(
        update={
            "data": config.data.model_copy(update={"difficulty": (0.1, 0.9)}),
            "rollout": config.rollout.model_copy(update={"max_tokens": 77}),
            "algorithm": config.algorithm.model_copy(update={"correct_reward": 0.5}),
        }
    )
    make_ready(other, folder)
    assert (load_run(folder).data.difficulty, load_run(folder).rollout.max_tokens) == ((0.1, 0.9), 77)


def test_of_long_values_the_place_where_they_differ_is_shown(tmp_path: Path):
    prompts = [f"{'You solve riddles. ' * 30}{last}{' Think first.' * 30}" for last in ("Be brief.", "Be thorough.")]
    config = settings(tmp_path)
    before, after = (config.model_copy(update={"data": config.data.model_copy(update={"system_prompt": one})}) for one in prompts)
    folder = run_folder(before, admitted=True)
    with pytest.raises(ConfigError) as caught:
        make_ready(after, folder)
    assert re.search(r"was \.\.\..{,20}Be brief\. Think first", str(caught.value))
    assert re.search(r", and is \.\.\..{,20}Be thorough\. Think first", str(caught.value))
    assert len(str(caught.value)) < 600


def test_damaged_settings_of_a_run_are_named_with_the_line(tmp_path: Path):
    config = settings(tmp_path)
    folder = run_folder(config, admitted=True)
    (folder / "config.json").write_text((folder / "config.json").read_text()[:100])
    with pytest.raises(ConfigError, match=r"config.json is not the settings of a run: Expecting .* line 6 .* restore it"):
        make_ready(config, folder)


@pytest.mark.parametrize("why", ["a file stands there", "a file stands on the way"])
def test_a_run_folder_that_cannot_be_made_is_said_so_with_the_setting(tmp_path: Path, why: str):
    (tmp_path / "taken").touch()
    place = tmp_path / "taken" if why == "a file stands there" else tmp_path / "taken" / "below"
    with pytest.raises(ConfigError, match=r"run.folder .*: no run can be kept there: (File exists|Not a directory) .* with run.folder=..."):
        make_run_folder(settings(place))
