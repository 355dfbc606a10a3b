"""A checker that shares code with what it judges would share its faults."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import pipelinerl.checker

FILES = sorted(Path(pipelinerl.checker.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_checker_imports_the_standard_library_itself_and_xxhash_alone(path: Path):
    imported = {name for node in ast.walk(ast.parse(path.read_text())) for name in _modules_of(node)}
    foreign = {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names}
    assert {name for name in foreign if not name.startswith("pipelinerl.checker.")} <= {"xxhash"}, "nobody here wrote that one"


def test_every_file_of_the_checker_is_looked_at():
    assert {path.name for path in FILES} >= {"__main__.py", "history.py", "invariants.py", "rollouts.py", "state.py", "steps.py"}


def _modules_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "." if node.level == 0 else "relative"]
    return []
