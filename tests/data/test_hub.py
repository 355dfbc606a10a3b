"""Names of the Hub are taken from its cache, in the layout that `huggingface_hub` reads, else refused with a command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest

from orchestrator.data.rows import Table, open_rows
from pipelinerl.config import DataSection
from pipelinerl.config.file import parse
from pipelinerl.data.hub import dataset_files, is_dataset, resolved
from pipelinerl.errors import ConfigError

SHA = "0123456789abcdef0123456789abcdef01234567"
CARD = """---
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test-*]
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# A card
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, without a network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def _snapshot(cache: Path, kind: str, name: str) -> Path:
    repository = cache / f"{kind}--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(SHA)
    folder = repository / "snapshots" / SHA
    folder.mkdir(parents=True)
    return folder


def _parquet(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"question": text} for text in texts]), path)


def _rows(source: str) -> list[Any]:
    rows = open_rows(DataSection(source=source), seed=0)  # pyright: ignore[reportCallIssue]
    assert isinstance(rows, Table)
    return [rows[number]["question"] for number in range(len(rows))]


def _config(**sections: Any) -> Any:
    smallest = {"model": {"path": "Qwen/Qwen3-0.6B"}, "data": {"source": "a.jsonl"}, "reward": [{"function": "a:b"}]}
    return parse(smallest | sections, origin="my.toml")


def test_a_model_in_the_cache_is_its_folder(cache: Path) -> None:
    folder = _snapshot(cache, "models", "Qwen/Qwen3-0.6B")
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    assert resolved(_config()).model.path == folder
    assert resolved(_config(reference={"path": "Qwen/Qwen3-0.6B"})).reference.path == folder


def test_a_folder_of_that_name_comes_first(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert resolved(_config()).model.path == Path("Qwen/Qwen3-0.6B")
    assert resolved(_config(model={"path": "/models/of/mine"})).model.path == Path("/models/of/mine"), "no name of the Hub"


def test_what_is_neither_here_nor_to_be_had_is_refused_with_the_command(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: Qwen/Qwen3-0\.6B is no path from .* hf download Qwen/Qwen3-0\.6B; then copy"):
        resolved(_config())
    _snapshot(cache, "models", "Qwen/Qwen3-0.6B").joinpath("config.json").write_text("{}")  # as vLLM's or a tokenizer's download leaves it
    with pytest.raises(ConfigError, match=r"lacks \*\.safetensors.* hf download Qwen/Qwen3-0\.6B"):
        resolved(_config())
    with pytest.raises(ConfigError, match=r"data\.source: openai/gsm8k .* hf download --repo-type dataset openai/gsm8k; then"):
        dataset_files("openai/gsm8k:main/train")


def test_a_data_set_is_read_by_what_its_card_declares(cache: Path) -> None:
    folder = _snapshot(cache, "datasets", "openai/gsm8k")
    (folder / "README.md").write_text(CARD)
    _parquet(folder / "main" / "train-00000-of-00002.parquet", "a", "b")
    _parquet(folder / "main" / "train-00001-of-00002.parquet", "c")
    _parquet(folder / "main" / "test-00000-of-00001.parquet", "d")
    _parquet(folder / "socratic" / "train-00000-of-00001.parquet", "e")
    assert _rows("openai/gsm8k") == _rows("openai/gsm8k:train") == _rows("openai/gsm8k:main/train") == ["a", "b", "c"]
    assert _rows("openai/gsm8k:test") == ["d"]
    assert _rows("openai/gsm8k:socratic/train") == ["e"]
    with pytest.raises(ConfigError, match="no file of split 'test' of config 'socratic'"):
        dataset_files("openai/gsm8k:socratic/test")


def test_a_data_set_without_a_card_is_read_by_the_names_of_its_files(cache: Path) -> None:
    folder = _snapshot(cache, "datasets", "me/mine")
    _parquet(folder / "data" / "train-00000-of-00001.parquet", "a")
    _parquet(folder / "data" / "training_notes.parquet", "no split")
    (folder / "test.jsonl").write_text('{"question": "b"}\n')
    assert (_rows("me/mine"), _rows("me/mine:test")) == (["a"], ["b"])


def test_files_and_functions_are_no_data_sets() -> None:
    assert not any(map(is_dataset, ("rows/a.jsonl", "rows/a.csv", "sources/mine.py:rows", "package.module:rows", "./a/b", "/a/b")))
    assert is_dataset("openai/gsm8k:main/train")
