"""The trained model as a Hugging Face folder: what transformers and vLLM load, tokenizer included; and its adapter as one of PEFT's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from pipelinerl.data.stop_tokens import stop_tokens_of
from pipelinerl.errors import ConfigError
from pipelinerl.weights.adapters import published_name
from trainer.model.lora import Adapters
from trainer.model.model import Model

_WRITTEN_BY_MODEL = {".safetensors", ".bin", ".pt", ".pth"}
"""Weights of the source folder, in any format: the saved model brings its own."""


def save_model(model: Model, folder: Path, *, source: Path, stop_token_ids: Sequence[int] = ()) -> None:
    """Save the present weights to `folder`, which may exist (it may be `source`), with the tokenizer and other files of `source`.

    Its generation_config.json names every stop token that it was sampled with: those of `source`, and `stop_token_ids`.

    Everything is written to `.<folder>.draft` first and then takes the folder's name, so that no reader finds half a model. Every rank that
    holds a part of the model calls this; the first one writes.
    """
    state = {name: tensor for name, tensor in model.state() if model.writes}
    if not model.writes:
        return
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    model.module.save_pretrained(draft, state_dict=state)
    for path in source.iterdir():
        if (
            path.is_file()
            and path.suffix not in _WRITTEN_BY_MODEL
            and not path.name.endswith(".index.json")
            and not (draft / path.name).exists()
        ):
            shutil.copy2(path, draft / path.name)
    if (source / "tokenizer_config.json").exists():
        _name_stop_tokens(draft / "generation_config.json", stop_tokens_of(source, extra=stop_token_ids).ids)
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        draft.rename(folder)
        shutil.rmtree(old)
    else:
        draft.rename(folder)


def refuse_to_replace(folder: Path) -> None:
    """Raise `ConfigError` for a folder with something else than a model in it, such as a run's: saving would remove that."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, and a model is a folder. Name a new or empty folder.")
    if folder.is_dir() and any(folder.iterdir()) and not _is_model(folder):
        raise ConfigError(f"{folder} holds something else than a model, and saving one there would remove it. Name a new or empty folder.")


def _is_model(folder: Path) -> bool:
    """Return whether a folder is a model's or an adapter's: a run has a `config.json`, too, which names no `model_type`."""
    if (folder / "adapter_config.json").exists():
        return True
    try:
        return "model_type" in json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False


def _name_stop_tokens(path: Path, stop_token_ids: Sequence[int]) -> None:
    """Have Hugging Face's generation and vLLM end completions as the run did."""
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(settings | {"eos_token_id": list(stop_token_ids)}, indent=2) + "\n")


def save_adapter(model: Model, folder: Path, *, adapters: Adapters, source: Path) -> None:
    """Save the present adapters alone, as a folder that PEFT and vLLM load over the model in `source`.

    Every rank that holds a part calls this; the first one writes.
    """
    tensors = model.adapter_state()
    if not model.writes:
        return
    folder.mkdir(parents=True, exist_ok=True)
    whole = {published_name(name): tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(adapters.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
