"""What transformers finds out when it is imported, kept from one process to the next; a process each, because a module is imported once."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.runtime import import_cache

PACKAGE = {
    "__init__.py": """
from pathlib import Path
import transformers.utils.import_utils as import_utils
models = Path(__file__).with_name("models")
structures = [repr(import_utils.create_import_structure_from_path(given)) for given in (models, str(models / "__init__.py"))]
""",
    "utils/__init__.py": "",
    "utils/import_utils.py": """
import importlib.metadata
PACKAGE_DISTRIBUTION_MAPPING = importlib.metadata.packages_distributions()
scans = []
def create_import_structure_from_path(path):
    scans.append(str(path))
    return {frozenset({"torch"}): {"modeling_a": {"A"}}, "deep": {frozenset(): {"b": {"B"}}}}
""",
}
"""A package of this name and shape, in which looking is counted."""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder of installed packages."""
    folder = tmp_path / "site-packages"
    for name, text in PACKAGE.items():
        path = folder / "transformers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "transformers-5.0.dist-info").mkdir()
    return folder


def _import(folder: Path) -> tuple[int, str]:
    """Import it in a process of its own; how often it looked, and what it found."""
    work = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from pipelinerl.runtime.import_cache import remember_transformers as remember; remember(); remember();"
        "import transformers as t; u = t.import_utils; print(len(u.scans), len(u.PACKAGE_DISTRIBUTION_MAPPING) > 9, t.structures)"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder.parent / "cache")}
    told = subprocess.run([sys.executable, "-c", work, str(folder)], env=environment, capture_output=True, text=True, check=True).stdout
    count, rest = told.split(" ", 1)
    return int(count), rest


@pytest.mark.process
def test_what_one_process_found_is_not_looked_for_again_until_something_is_installed(installed: Path):
    first, second = _import(installed), _import(installed)
    assert (first[0], second[0]) == (1, 0)
    assert first[1] == second[1]
    assert "frozenset({'torch'}): {'modeling_a': {'A'}}, 'deep'" in second[1]
    (installed / "other-1.0.dist-info").mkdir()
    assert _import(installed)[0] == 1


@pytest.mark.process
def test_a_damaged_file_is_found_out_anew_and_a_package_under_work_always(installed: Path):
    first = _import(installed)
    (kept,) = (installed.parent / "cache" / "pipelinerl").iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    assert _import(installed) == first
    under_work = installed.rename(installed.with_name("sources"))
    assert [_import(under_work)[0] for _ in range(2)] == [2, 2]


def test_the_form_on_disk_gives_what_the_real_package_finds():
    from transformers.utils import import_utils

    models = Path(str(import_utils.__file__)).parents[1] / "models"
    scan: Any = import_utils.create_import_structure_from_path
    found = scan(models / "llama") | {"qwen3": scan(models / "qwen3"), "auto": scan(models / "auto")}
    assert import_cache._structure_of(import_cache._folder_of(found)) == found


def test_the_installation_is_told_by_its_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "missing")])
    before = import_cache._installation()
    (tmp_path / "notes.txt").write_text("")
    assert import_cache._installation() == before
    (tmp_path / "one-1.0.dist-info").mkdir()
    assert (installed := import_cache._installation()) != before
    os.utime(tmp_path / "one-1.0.dist-info", (0, 0))  # installed again
    assert import_cache._installation() != installed


def test_pythons_own_search_is_back_after_the_import():
    search = importlib.metadata.packages_distributions
    with import_cache._answers({"a": ["b"]}):
        assert importlib.metadata.packages_distributions() == {"a": ["b"]}
    assert importlib.metadata.packages_distributions is search
