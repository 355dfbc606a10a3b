"""A tokenizer that cannot be loaded is named with its folder, whatever is wrong with it; and what is scored is text alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.data.tokenizer import decoder, load_tokenizer
from pipelinerl.errors import ConfigError


@pytest.mark.parametrize("text", ["", "{", '{"version": "1.0"}', "[]"], ids=["empty", "cut off", "no model", "no object"])
def test_a_damaged_tokenizer_is_named_with_its_folder(tmp_path: Path, text: str):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=f"the tokenizer of {tmp_path} cannot be loaded: ."):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=f"the tokenizer of {tmp_path} cannot be loaded: ."):
        load_tokenizer(tmp_path)


def test_what_is_made_of_a_models_config_alone_is_no_tokenizer(tmp_path: Path):
    from tests.tiny_models import make_qwen2

    make_qwen2(tmp_path)
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ConfigError, match=f"{tmp_path} has no tokenizer: save the model's own there"):
        load_tokenizer(tmp_path)


def test_an_end_of_sequence_is_no_part_of_the_text_that_is_scored(tmp_path: Path):
    from tests.tiny_models import make_tokenizer

    make_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    token_ids = [*tokenizer.encode("1+1", add_special_tokens=False), tokenizer.eos_token_id]
    assert decoder(tokenizer)(token_ids) == "1+1"
