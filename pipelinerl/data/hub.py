"""Names of the Hugging Face Hub, where a folder or a file is expected: `Qwen/Qwen3-0.6B`, `openai/gsm8k:main/train`.

What the local cache holds (`HF_HOME`) is taken as it is; else it is fetched, where there is a network; else the error says which command
fetches it. A folder of that name on the disk comes first. Of a data set only its files of rows are read, Parquet or JSON lines, by
`huggingface_hub`, which transformers brings: the package `datasets` would add its own cache of another format, pandas and a script loader;
what needs it (streams, loading scripts) is a Python function, `path:name`, that returns a `datasets.Dataset`.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelinerl.config import Config
from pipelinerl.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.py")
_ROWS = (".parquet", ".jsonl")
_FILES = frozenset((*_ROWS, ".py", ".json", ".ndjson", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zip", ".zst"))
"""Endings of what is meant as a file of this disk."""
_COMMAND = "On a machine with a network: hf download {options}{name}; then copy its folder under $HF_HOME/hub here, or set HF_HOME."


def resolved(config: Config, *, is_dry: bool = False) -> Config:
    """Return the settings with local folders in place of the Hub's names.

    Raises `ConfigError` for what is neither here nor to be had; with `is_dry` that name stays, and preflight says so beside whatever else
    it finds.
    """
    changes: dict[str, Any] = {}

    def folder_of(path: Path, key: str) -> Path:
        try:
            return model_folder(path, key=key)
        except ConfigError:
            if is_dry:
                return path
            raise

    for name in ("model", "reference", "critic", "prm"):
        section = getattr(config, name)
        if section.path is not None and (folder := folder_of(section.path, f"{name}.path")) != section.path:
            changes[name] = section.model_copy(update={"path": folder})
    if any(reward.model is not None for reward in config.reward):
        rewards = enumerate(config.reward)
        changes["reward"] = tuple(
            reward.model_copy(update={"model": reward.model and model_folder(reward.model, key=f"reward.{number}.model")})
            for number, reward in rewards
        )
    if config.reference.teachers:
        teachers = {name: folder_of(path, f"reference.teachers.{name}") for name, path in config.reference.teachers.items()}
        changes["reference"] = config.reference.model_copy(update={"teachers": teachers})
    return config.model_copy(update=changes) if changes else config


def model_folder(path: Path, *, key: str) -> Path:
    """Return the folder of a model: `path`, or where the Hub's model of that name lies. Raises `ConfigError`."""
    if path.exists() or not _NAME.fullmatch(str(path)):
        return path
    return _fetched(str(path), key=key, kind="model", patterns=_MODEL_FILES, needed=("config.json", "*.safetensors"))


def is_dataset(source: str) -> bool:
    """Return whether the text names a data set of the Hub, and nothing on this disk."""
    name = source.partition(":")[0]
    return bool(_NAME.fullmatch(name)) and not Path(name).exists() and Path(name).suffix not in _FILES


def dataset_files(source: str, *, key: str = "data.source") -> list[Path]:
    """Return the files of `owner/name`, `owner/name:split`, or `owner/name:config/split`; default split: train. Raises `ConfigError`."""
    name, _, part = source.partition(":")
    config, _, split = part.rpartition("/")
    split = split or "train"
    folder = _fetched(name, key=key, kind="dataset", patterns=["README.md", *(f"*{ending}" for ending in _ROWS)], needed=())
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix in _ROWS)
    chosen = _of_split(files, declared=_declared(folder), config=config, split=split)
    if not chosen:
        raise ConfigError(f"{key}: {source}: no file of split {split!r} of config {config or 'default'!r} in {folder}, which holds {files}")
    return [folder / path for path in chosen]


def _of_split(files: Sequence[str], *, declared: list[dict[str, Any]], config: str, split: str) -> list[str]:
    """Choose a split's files as the data set's card declares them, else by the names that `datasets` expects: `<config>/<split>-...`."""
    for one in declared:
        if (one.get("config_name", "default") == config) if config else (one.get("default") or len(declared) == 1):
            entries = one.get("data_files") or []
            entries = entries if isinstance(entries, list) else [{"split": "train", "path": entries}]
            wanted = [entry["path"] for entry in entries if isinstance(entry, dict) and entry.get("split") == split]
            patterns = [pattern for paths in wanted for pattern in ([paths] if isinstance(paths, str) else paths)]
            return [file for file in files if any(fnmatch.fnmatch(file, pattern) for pattern in patterns)]
    folders = (config,) if config else ("data", "")
    for folder in folders:
        inside = [file for file in files if os.path.dirname(file) == folder]
        if found := [file for file in inside if re.match(rf"{re.escape(split)}([-._]|$)", os.path.basename(file))]:
            return found
    return []


def _declared(folder: Path) -> list[dict[str, Any]]:
    """Return the `configs` of a data set's card."""
    from huggingface_hub import metadata_load

    card = folder / "README.md"
    metadata = metadata_load(card) if card.exists() else None
    found = (metadata or {}).get("configs") or []
    return [one for one in found if isinstance(one, dict)]


def _fetched(name: str, *, key: str, kind: str, patterns: Sequence[str], needed: Sequence[str]) -> Path:
    """Return the folder of what has this name, from the cache where all that is needed is there, else from the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    why = ""
    try:
        folder = Path(snapshot_download(name, repo_type=kind, allow_patterns=list(patterns), local_files_only=True))
        if not _lacks(folder, needed):
            return folder
    except LocalEntryNotFoundError:
        folder = None
    try:
        folder = Path(snapshot_download(name, repo_type=kind, allow_patterns=list(patterns)))
        if not _lacks(folder, needed):
            return folder
    except Exception as error:  # no network, no such name, no permission: the library and what it stands on raise many kinds
        why = f", and it cannot be fetched ({type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]})"
    where = "it is not in the Hub's cache" if folder is None else f"in the Hub's cache it lacks {_lacks(folder, needed)}"
    options = "" if kind == "model" else "--repo-type dataset "
    raise ConfigError(f"{key}: {name} is no path from {Path.cwd()}, {where}{why}. {_COMMAND.format(options=options, name=name)}")


def _lacks(folder: Path, needed: Sequence[str]) -> str:
    return ", ".join(pattern for pattern in needed if not any(folder.glob(pattern)))
