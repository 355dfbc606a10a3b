"""Loads a model folder's weights, as transformers names them.

Weights that are sharded are read in the dtype that the files have: transformers then maps the files, and no rank copies more than it looks
at. In another dtype every rank of a machine would make a whole copy of its own: 32 B parameters in float32 by 8 ranks are 1 TB.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch._guards import detect_fake_mode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForTokenClassification, PreTrainedModel

from pipelinerl.config.families import check_trainable, takes_images
from pipelinerl.errors import ConfigError
from trainer.model import attention

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""By safetensors' names."""


def dtype_on_disk(folder: Path) -> torch.dtype | None:
    """The dtype of all tensors of a folder; None where it has none in safetensors, or several: one of them would lose digits."""
    index = folder / "model.safetensors.index.json"
    files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    found: set[str] = set()
    for file in files:
        if not (folder / file).is_file():
            return None
        with safe_open(folder / file, framework="pt") as reader:
            found |= {reader.get_slice(name).get_dtype() for name in reader.keys()}  # noqa: SIM118
    return _DTYPES.get(found.pop()) if len(found) == 1 else None


def has_values() -> bool:
    """False under `trainer.dry_run`, whose tensors have shapes only: of a folder, config.json is then all that is read."""
    return detect_fake_mode() is None


def language_model(folder: Path, *, dtype: torch.dtype) -> PreTrainedModel:
    """The language model of a folder. Raises `ConfigError` where it cannot be loaded."""
    return _from_folder(AutoModelForImageTextToText if takes_images(folder) else AutoModelForCausalLM, folder, dtype=dtype)[0]


def value_model(folder: Path, *, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a folder with one output per token, named `score`; 0 for every state until it is trained."""
    if takes_images(folder):
        raise ConfigError(
            f"{folder} takes images, and value models are not written for its family: choose a method without a critic, or set critic.path"
        )
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # that a language model lacks the weights of a score is known
    try:
        module, missing = _from_folder(AutoModelForTokenClassification, folder, dtype=dtype, num_labels=1)
    finally:
        transformers.logging.set_verbosity(verbosity)
    score: Any = module.score
    with torch.no_grad():
        for name, parameter in score.named_parameters():
            if f"score.{name}" in missing:
                parameter.zero_()
    return module


def _from_folder(kind: Any, folder: Path, *, dtype: torch.dtype, **options: Any) -> tuple[PreTrainedModel, set[str]]:
    """The model, and the names of its parameters that the folder does not hold."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not a Hugging Face model folder: it has no config.json (looked from {Path.cwd()})")
    check_trainable(folder)
    implementation = {"text_config": attention.NAME, "vision_config": "sdpa"} if takes_images(folder) else attention.NAME
    if not has_values():
        config = AutoConfig.from_pretrained(folder, local_files_only=True, **options)
        return kind.from_config(config, dtype=dtype, attn_implementation=implementation), set()
    transformers.logging.disable_progress_bar()  # one line in a log for every shard of every model tells nobody anything
    try:
        module, loading = kind.from_pretrained(
            folder, dtype=dtype, attn_implementation=implementation, local_files_only=True, output_loading_info=True, **options
        )
    except (OSError, ValueError, ImportError, RuntimeError, KeyError) as error:
        raise ConfigError(f"model folder {folder} cannot be loaded as a language model: {type(error).__name__}: {error}") from error
    return module, set(loading["missing_keys"])
