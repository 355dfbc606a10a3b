"""A tokenizer that cannot be loaded is named with its folder, whatever is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.tokenizer import load_tokenizer


@pytest.mark.parametrize("text", ["", "{", '{"version": "1.0"}', "[]"], ids=["empty", "cut off", "no model", "no object"])
def test_a_damaged_tokenizer_is_named_with_its_folder(tmp_path: Path, text: str):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=f"the tokenizer of {tmp_path} cannot be loaded: ."):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=f"the tokenizer of {tmp_path} cannot be loaded: ."):
        load_tokenizer(tmp_path)
