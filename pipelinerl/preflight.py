"""What can be known to be wrong before anything starts: the model folder and how it is cut, the method, functions, prompt files."""

from __future__ import annotations

import json
from pathlib import Path

from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.errors import ConfigError
from pipelinerl.layout import check_layout
from pipelinerl.plugin import load_plugin


def check(config: Config) -> None:
    """Raise `ConfigError` listing everything that is wrong at once."""
    problems: list[str] = []
    for look in (_model, _layout, _method, _functions, _sources):
        try:
            look(config)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def _model(config: Config) -> None:
    folder = config.model.path
    if not folder.is_dir():
        raise ConfigError(f"model.path: no folder at {folder} (looked from {Path.cwd()}); name a Hugging Face model folder")
    missing = [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).exists()]
    if not list(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(
            f"model.path: {folder} lacks {', '.join(missing)}; a Hugging Face model folder with safetensors weights is expected"
        )
    context = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    wanted = config.model.max_tokens or context
    if context and wanted > context:
        raise ConfigError(f"model.max_tokens is {wanted}, but {folder} was made for {context} positions; lower model.max_tokens")
    if wanted and config.rollout.max_tokens >= wanted:
        raise ConfigError(
            f"rollout.max_tokens is {config.rollout.max_tokens}, and the context holds {wanted} tokens, prompt included: no room left for"
            " a prompt. Lower rollout.max_tokens."
        )


def _layout(config: Config) -> None:
    check_layout(config.trainer.layout, config.model.path)


def _method(config: Config) -> None:
    method_of(config)


def _functions(config: Config) -> None:
    for reward in config.reward:
        if not callable(load_plugin(reward.function)):
            raise ConfigError(f"reward.function: {reward.function} is not a function")
    if (environment := config.environment.function) is not None and not callable(load_plugin(environment)):
        raise ConfigError(f"environment.function: {environment} is not a function")


def _sources(config: Config) -> None:
    sources = [config.data.source] if isinstance(config.data.source, str) else list(config.data.source)
    for key, source in (*(("data.source", source) for source in sources), ("evaluation.source", config.evaluation.source)):
        if source is None:
            continue
        if source.endswith((".jsonl", ".parquet")):
            if not Path(source).is_file():
                raise ConfigError(f"{key}: no file at {source} (looked from {Path.cwd()})")
        else:
            load_plugin(source)
