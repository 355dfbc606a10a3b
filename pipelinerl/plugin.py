"""Plug-ins by name: `path:name`, where path is a Python file or an importable module and name something in it."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from pipelinerl.errors import ConfigError


def load_plugin(reference: str) -> Any:
    """Import what `path:name` names. Raises `ConfigError` saying which half is wrong and the nearest name there is."""
    path, colon, name = reference.rpartition(":")
    if not colon or not path or not name:
        raise ConfigError(f"{reference!r} is not `path:name`, for example `rewards.py:exact_match` or `my_package.rewards:exact_match`")
    module = _load_file(Path(path)) if path.endswith(".py") else _load_module(path)
    try:
        return getattr(module, name)
    except AttributeError:
        names = [candidate for candidate in vars(module) if not candidate.startswith("_")]
        near = difflib.get_close_matches(name, names, n=1)
        raise ConfigError(
            f"{path} has no {name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(names)}")
        ) from None


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"no Python file at {path} (looked from {Path.cwd()})")
    name = f"pipelinerl_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise anything; it becomes a named error with its cause
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # as above
        raise ConfigError(f"module {name} cannot be imported: {type(error).__name__}: {error}") from error
