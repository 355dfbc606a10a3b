"""How much there is to read: no file of the product is long, and seven of them tell the whole flow."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("pipelinerl", "orchestrator", "trainer", "scripts", "examples")
FLOW = ("pipeline.py", "stages/generation.py", "stages/scoring.py", "stages/batching.py", "stages/training.py", "stages/weight_sync.py")


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


@pytest.mark.parametrize("folder", PRODUCT)
def test_no_file_has_more_than_400_lines(folder: str) -> None:
    sizes = {str(path.relative_to(ROOT)): num_lines(path) for path in (ROOT / folder).rglob("*.py")}
    assert len(sizes) > 2
    assert {path: size for path, size in sizes.items() if size > 400} == {}


def test_seven_files_of_at_most_1200_lines_tell_the_flow() -> None:
    sizes = [num_lines(ROOT / "orchestrator" / name) for name in FLOW]
    assert sum(sizes) + num_lines(ROOT / "pipelinerl" / "messages" / "rollouts.py") <= 1200


@pytest.mark.parametrize("folder", ["pipelinerl", "orchestrator", "trainer"])
def test_every_package_holds_something_and_its_types_are_for_others_too(folder: str) -> None:
    assert (ROOT / folder / "py.typed").is_file()
    packages = {path.parent for path in (ROOT / folder).rglob("__init__.py")}
    assert [package for package in packages if not [path for path in package.glob("*.py") if num_lines(path)]] == []


def test_the_quick_checks_run_before_a_commit() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    check = (ROOT / "scripts" / "check").read_text()
    for command in (".venv/bin/ruff format", ".venv/bin/ruff check", ".venv/bin/lint-imports --no-logo"):
        assert f"entry: {command}" in hooks
        assert command in check
