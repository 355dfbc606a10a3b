"""The saved folder is a whole Hugging Face model, and takes its place at once."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from pipelinerl.data.stop_tokens import stop_tokens_of
from tests import families
from tests.families import RECIPES
from tests.tokenizers import CHATML, make_words
from tests.trainer.tiny import make_model
from trainer.checkpoint.model_folder import save_model


@pytest.mark.parametrize("model_type", RECIPES)
def test_a_saved_model_computes_the_same_in_transformers(tmp_path: Path, model_type: str) -> None:
    folder = families.make_folder(tmp_path / "source", model_type=model_type)
    model = make_model(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    save_model(model, tmp_path / "model", source=folder)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")(ids).logits
        source = AutoModelForCausalLM.from_pretrained(folder)
        for parameter in source.parameters():
            parameter.mul_(1.01)
        expected = source(ids).logits
    assert torch.equal(saved, expected)
    assert "attn" not in json.dumps(
        {key: value for key, value in json.loads((tmp_path / "model/config.json").read_text()).items() if "impl" in key}
    )


def test_other_files_of_the_source_come_along_and_old_weights_do_not(folders: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        "pytorch_model.bin",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
    ):
        (source / name).write_text(name)
    save_model(make_model(folders["llama"]), tmp_path / "model", source=source)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert not names & {"pytorch_model.bin", "model-00001-of-00002.safetensors", "model.safetensors.index.json"}


def test_saving_over_the_source_replaces_it_whole(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model(make_model(folders["qwen3"]), folder, source=folders["qwen3"])
    (folder / "tokenizer.json").write_text("kept")
    (folder / "model-00007-of-00009.safetensors").write_text("gone")
    model = make_model(folder)
    with torch.no_grad():
        model.parameters()[0].fill_(3.0)
    save_model(model, folder, source=folder)
    assert (folder / "tokenizer.json").read_text() == "kept"
    assert not (folder / "model-00007-of-00009.safetensors").exists()
    assert make_model(folder).parameters()[0].eq(3.0).all()
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_the_source_is_whole_until_the_new_model_is_written(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model(make_model(folders["qwen3"]), folder, source=folders["qwen3"])
    model = make_model(folder)
    model.module.save_pretrained = _fail  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(OSError, match="disk is full"):
        save_model(model, folder, source=folder)
    make_model(folder)


def _fail(folder: Path, *, state_dict: object) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_text("half")
    raise OSError("disk is full")


def test_whoever_serves_the_saved_model_ends_completions_as_the_run_did(folders: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(folders["qwen3"], source)
    make_words(source, template=CHATML, eos="<|im_end|>")
    save_model(make_model(source), tmp_path / "model", source=source, stop_token_ids=(5,))
    assert GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id == [2, 5]
    assert stop_tokens_of(tmp_path / "model").ids == (2, 5)
    assert stop_tokens_of(tmp_path / "model").warnings == ()
