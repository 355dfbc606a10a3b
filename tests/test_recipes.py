"""The recipes of CONTRIBUTING.md, followed to the letter in a copy: files are made, changes applied, commands run, and the thing acts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
COPIED = ("pipelinerl", "orchestrator", "trainer", "tests", "examples", "scripts", "docs", "pyproject.toml")
pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(240)]


def recipe(title: str) -> str:
    (text,) = re.findall(rf"\n### {title}\n(.*?)(?=\n###? )", PAGE, re.DOTALL)
    return text


def follow(title: str, root: Path) -> list[str]:
    """Follow a recipe in a copy of the repository; what each command printed, in order."""
    ignored = shutil.ignore_patterns("*.egg-info", "results", "bench", "*.tar.xz")  # compiled modules come along: they say of which time
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, root / name)
    (root / ".venv").symlink_to(ROOT / ".venv")
    printed: list[str] = []
    touched: set[str] = set()
    path = ""
    """Named last: what the next block is about."""
    for before, language, block in re.findall(r"(.*?)\n```(\w*)\n(.*?)```", recipe(title), re.DOTALL):
        path = next(reversed(re.findall(r"`([\w./]+\.(?:py|toml))`", before)), path)
        if language in ("python", "toml"):
            (root / path).write_text(block)
        elif language == "diff":
            apply(block, root / path)
        else:
            printed += [executed(line, root) for line in block.splitlines()]
            continue
        touched.add(path)
    lines = " ".join(path for path in touched if path.endswith(".py"))
    executed(f".venv/bin/ruff check {lines} && .venv/bin/ruff format --check {lines}", root)
    return printed


def apply(block: str, path: Path) -> None:
    """Change the one place of a file that has the lines of a diff which are there before."""
    lines = [(line[:1], line[1:]) for line in block.splitlines()]
    before = "\n".join(text for mark, text in lines if mark != "+") + "\n"
    after = "\n".join(text for mark, text in lines if mark != "-") + "\n"
    held = path.read_text()
    assert held.count(before) == 1, f"{path.name} has {held.count(before)} places with\n{before}"
    path.write_text(held.replace(before, after))


def executed(command: str, root: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(root), "COLUMNS": "200"}
    ended = subprocess.run(command, shell=True, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


def test_a_reward_says_what_it_was_written_to_say(tmp_path: Path) -> None:
    _, right, partly, dry = follow("A reward", tmp_path)
    assert right.count("21") >= 1
    assert "1" in right
    assert "0.25" in partly
    assert "nothing is wrong" in " ".join(dry.split())


def test_a_method_stands_in_the_table_and_trains(tmp_path: Path) -> None:
    by_hand, every, table = follow("A method", tmp_path)
    for told in (by_hand, every):
        assert re.search(r"[1-9]\d* passed", told)
        assert "failed" not in told
    assert "grpo_median" in table
    assert "scale * (R - median_g)" in table


def test_a_transport_keeps_the_promises_of_all_others(tmp_path: Path) -> None:
    _, told = follow("A weight transport", tmp_path)
    passed = re.search(r"(\d+) passed", told)
    assert passed is not None
    assert int(passed[1]) >= 20
    assert '"raw"' in (tmp_path / "docs" / "config.md").read_text()


def test_a_stage_joins_the_flow_and_loses_nothing(tmp_path: Path) -> None:
    told, replayed, contracts = follow("A stage", tmp_path)
    assert "1 passed" in told
    assert re.search(r"[1-9]\d* passed", replayed)
    assert "0 broken" in contracts


def test_a_change_that_does_not_fit_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("one\ntwo\n")
    with pytest.raises(AssertionError, match="0 places"):
        apply(" three\n+four\n", tmp_path / "file.py")
    apply(" one\n+between\n", tmp_path / "file.py")
    assert (tmp_path / "file.py").read_text() == "one\nbetween\ntwo\n"
