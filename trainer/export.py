"""`python -m trainer.export --run-folder RUN --output FOLDER`: the newest checkpoint of a run as a Hugging Face folder.

A run that ends by itself leaves its model in `<run>/model`; this is for one that did not, or that is under way.
"""

from __future__ import annotations

import argparse
import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from pipelinerl.config import Config
from pipelinerl.config.backends import TrainerBackend
from pipelinerl.config.file import load_run
from pipelinerl.errors import ConfigError, PipelineError
from pipelinerl.storage.checkpoint_folder import newest_whole
from trainer.build import adapters_of
from trainer.checkpoint.model_folder import refuse_to_replace, save_adapter, save_model
from trainer.model.megatron_names import Heads, names_of, packed_of, parts_of
from trainer.model.model import Model
from trainer.parallel.boxes import placed


def export(config: Config, run_folder: Path, output: Path, *, adapter_only: bool = False) -> int:
    """Write the newest whole checkpoint's model, with the tokenizer of `model.path`, to `output`; return its version. Raises `ConfigError`.

    Adapters are merged into it; `adapter_only` writes them by themselves, as PEFT and vLLM load them.
    """
    refuse_to_replace(output)
    adapters = adapters_of(config)
    if adapter_only and adapters is None:
        raise ConfigError(f"{run_folder} trained all weights (lora.rank is 0): it has no adapter to export")
    found = newest_whole(run_folder / "checkpoints")
    if found is None:
        raise ConfigError(
            f"{run_folder / 'checkpoints'} holds no whole checkpoint (yet): one is written every {config.checkpoint.every} steps"
        )
    checkpoint, manifest, damage = found
    for reason in damage:
        print(f"{reason}. The checkpoint before it is used", file=sys.stderr)
    model = Model(config.model.path, dtype=config.model.dtype, temperature=1.0, device=torch.device("cpu"), adapters=adapters)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters().items()}
        read = functools.partial(dcp.load, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
        if config.trainer.backend is TrainerBackend.MEGATRON:
            _unfuse(weights, heads=Heads.of(model.module.config), read=read)
        else:
            read({"model": model.placed(weights)})
    if adapters is not None and adapter_only:
        save_adapter(model, output, adapters=adapters, source=config.model.path)
    else:
        save_model(model, output, source=config.model.path, stop_token_ids=config.rollout.stop_token_ids)
    return manifest.version


def _unfuse(weights: Mapping[str, torch.Tensor], *, heads: Heads, read: Callable[[dict[str, Any]], None]) -> None:
    """Have `weights`, by Hugging Face's names, be those that a checkpoint holds in Megatron-Core's form, which `read` reads."""
    held = {theirs: heads.join([weights[name] for name in parts_of(theirs)]) for theirs in names_of(weights)}
    read({"model": {theirs: placed(whole, like=whole, packed=packed_of(theirs)) for theirs, whole in held.items()}})
    for theirs, whole in held.items():
        names = parts_of(theirs)
        for name, part in zip(names, heads.split(whole, num=len(names)), strict=True):
            weights[name].copy_(part)


def main() -> None:
    """Export and say what was exported. An error of our own tree prints as one message and exits with 1."""
    parser = argparse.ArgumentParser(prog="python -m trainer.export", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True, help="run folder")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--adapter", action="store_true", help="the LoRA adapter by itself, not merged")
    arguments = parser.parse_args()
    try:
        version = export(load_run(arguments.run_folder), arguments.run_folder, arguments.output, adapter_only=arguments.adapter)
    except PipelineError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except OSError as error:
        sys.exit(f"{arguments.output} cannot be written: {error.strerror or error}. Name another folder, or make room")
    print(f"version {version}: {arguments.output}")


if __name__ == "__main__":
    main()
