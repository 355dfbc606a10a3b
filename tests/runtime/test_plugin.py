"""Plug-ins by name: a file or a module, and the nearest name where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.runtime.plugin import load_plugin


def test_a_function_of_a_file_is_found(tmp_path: Path):
    (tmp_path / "rewards.py").write_text("def exact_match(prompt, completion):\n    return float(prompt == completion)\n")
    reward = load_plugin(f"{tmp_path}/rewards.py:exact_match")
    assert reward("a", "a") == 1.0


def test_a_function_of_a_module_is_found():
    assert load_plugin("pathlib:Path") is Path
    assert load_plugin("os.path:join")("a", "b") == "a/b"


def test_a_relative_file_is_looked_for_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine.py").write_text("answer = 42\n")
    monkeypatch.chdir(tmp_path)
    assert load_plugin("mine.py:answer") == 42


def test_a_file_may_use_what_pickling_and_dataclasses_need(tmp_path: Path):
    """Both look a class's module up by its name."""
    (tmp_path / "typed.py").write_text(
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass Case:\n    number: int\n"
    )
    assert load_plugin(f"{tmp_path}/typed.py:Case")(number=3).number == 3


def test_two_files_of_one_name_in_two_folders_are_two_plugins(tmp_path: Path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rewards.py").write_text(f"def name():\n    return {folder!r}\n")
    first, second = (load_plugin(f"{tmp_path}/{folder}/rewards.py:name") for folder in ("one", "two"))
    assert (first(), second()) == ("one", "two")


@pytest.mark.parametrize("reference", ["rewards.py", "rewards", ":f", "rewards.py:", ""])
def test_what_is_no_reference_says_how_one_looks(reference: str):
    with pytest.raises(ConfigError, match=r"is not `path:name`, for example `rewards.py:exact_match`"):
        load_plugin(reference)


def test_a_missing_file_is_named_with_the_folder_it_was_looked_for_from(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no Python file at nowhere.py \(looked from /.*\)"):
        load_plugin("nowhere.py:f")


def test_a_missing_module_is_named():
    with pytest.raises(ConfigError, match=r"module no_such_package.rewards cannot be imported: ModuleNotFoundError"):
        load_plugin("no_such_package.rewards:f")


def test_a_file_that_raises_is_named_with_its_error_and_its_cause(tmp_path: Path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=r"broken.py cannot be imported: ZeroDivisionError: division by zero") as refused:
        load_plugin(f"{tmp_path}/broken.py:f")
    assert isinstance(refused.value.__cause__, ZeroDivisionError)


def test_a_missing_name_comes_with_the_nearest_one_or_all_there_are(tmp_path: Path):
    (tmp_path / "rewards.py").write_text("def exact_match(): ...\ndef length(): ...\n_private = 1\n")
    with pytest.raises(ConfigError, match=r"has no 'exact_mach'; did you mean 'exact_match'\?"):
        load_plugin(f"{tmp_path}/rewards.py:exact_mach")
    with pytest.raises(ConfigError, match=r"has no 'zzz'; it has exact_match, length$"):
        load_plugin(f"{tmp_path}/rewards.py:zzz")


def test_an_error_in_a_user_s_file_is_shown_with_its_line(tmp_path: Path):
    (tmp_path / "broken.py").write_text("import json\n\n\ndef load():\n    return json.loads('{')\n\n\nTABLE = load()\n")
    with pytest.raises(ConfigError, match=rf"broken.py cannot be imported: JSONDecodeError: .*, at {tmp_path}/broken.py:5$"):
        load_plugin(f"{tmp_path}/broken.py:f")
    (tmp_path / "typo.py").write_text("def f(:\n    pass\n")
    with pytest.raises(ConfigError, match=rf"typo.py cannot be imported: SyntaxError: .*, at {tmp_path}/typo.py:1$"):
        load_plugin(f"{tmp_path}/typo.py:f")
    (tmp_path / "needs.py").write_text("\nimport no_such_package\n")
    with pytest.raises(ConfigError, match=rf"ModuleNotFoundError: No module named 'no_such_package', at {tmp_path}/needs.py:2$"):
        load_plugin(f"{tmp_path}/needs.py:f")


def test_a_typo_in_the_path_or_in_capitals_names_what_is_there(tmp_path: Path):
    (tmp_path / "rewards.py").write_text("def ExactMatch(): ...\n")
    with pytest.raises(ConfigError, match=rf"no Python file at {tmp_path}/reward.py .*; did you mean {tmp_path}/rewards.py\?"):
        load_plugin(f"{tmp_path}/reward.py:ExactMatch")
    with pytest.raises(ConfigError, match=r"has no 'exactmatch'; did you mean 'ExactMatch'\?"):
        load_plugin(f"{tmp_path}/rewards.py:exactmatch")


def test_a_method_of_an_object_is_found_by_a_dotted_name(tmp_path: Path):
    (tmp_path / "tasks.py").write_text("class Task:\n    def score(self): return 2.0\n\n\ntask = Task()\n")
    assert load_plugin(f"{tmp_path}/tasks.py:task.score")() == 2.0
    with pytest.raises(ConfigError, match=r"tasks.py:task has no 'scores'; did you mean 'score'\?"):
        load_plugin(f"{tmp_path}/tasks.py:task.scores")


def test_a_function_of_ours_that_moved_is_refused_with_its_new_name():
    with pytest.raises(
        ConfigError, match=r"pipelinerl.scorer.builtin:exact_match has moved: it is now pipelinerl.rewards.functions.builtin:exact_match"
    ):
        load_plugin("pipelinerl.scorer.builtin:exact_match")
