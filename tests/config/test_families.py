"""The table of families: the page and the tests have the same ones, and what is known not to work is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.families import FAMILIES, check_servable, check_trainable, table
from pipelinerl.errors import ConfigError
from tests.families import RECIPES


def folder_of(tmp_path: Path, **tree: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(tree))
    return tmp_path


def test_every_family_of_the_table_is_tested_and_shown() -> None:
    assert {family.model_type for family in FAMILIES} == RECIPES.keys()
    assert table() in (Path(__file__).parents[2] / "docs/models.md").read_text()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_a_family_of_the_table_needs_no_warning(tmp_path: Path, family: Any) -> None:
    folder = folder_of(tmp_path, model_type=family.model_type, layer_types=["full_attention", "sliding_attention"])
    assert check_trainable(folder) == ""
    if family.refused:
        with pytest.raises(ConfigError, match=rf"a {family.model_type} cannot be served to train it: vLLM"):
            check_servable(folder)
    else:
        check_servable(folder)


def test_a_family_that_was_never_run_is_said_to_be_so(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, model_type="telechat")
    assert "of the family 'telechat', which was never run here (docs/models.md names those that were)" in check_trainable(folder)
    check_servable(folder)


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, 'a model has layers of kind "linear_attention", in which'),
        ({"model_type": "falcon_h1", "mamba_d_state": 16}, "a falcon_h1 has mamba_d_state, in which"),
        ({"text_config": {"model_type": "llama4_text", "attention_chunk_size": 8192}}, "a llama4_text has attention_chunk_size, in which"),
    ],
)
def test_tokens_that_see_others_in_another_way_are_refused(tmp_path: Path, tree: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_trainable(folder_of(tmp_path, **tree))


def test_what_an_engine_could_never_take_is_refused_whatever_the_family(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a qwen3 cannot be served to train it: its weights are quantised \(fp8\)"):
        check_servable(folder_of(tmp_path, model_type="qwen3", quantization_config={"quant_method": "fp8"}))


def test_a_folder_that_tells_nothing_is_left_to_whoever_loads_it(tmp_path: Path) -> None:
    check_servable(tmp_path)
    (tmp_path / "config.json").write_text("no JSON")
    check_servable(tmp_path)
