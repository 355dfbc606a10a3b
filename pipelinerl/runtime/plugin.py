"""Plug-ins by name: `path:name`, where path is a Python file or an importable module and name something in it, also `name.attribute`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipelinerl.errors import ConfigError
from pipelinerl.runtime.function_errors import error_of, shown_path

MOVED = {
    f"pipelinerl.scorer.{name}:": f"pipelinerl.rewards.functions.{name}:"
    for name in ("builtin", "code", "judge", "math_answer", "rubric", "schema")
}
"""How references to our own functions began before -> how they begin now."""


def new_name(reference: str) -> str | None:
    """Return today's reference to a function of ours that has moved; None for every other."""
    return next((reference.replace(old, new, 1) for old, new in MOVED.items() if reference.startswith(old)), None)


def load_plugin(reference: str) -> Any:
    """Import what `path:name` names. Raises `ConfigError` saying which half is wrong and the nearest name there is."""
    path, colon, name = reference.rpartition(":")
    if not colon or not path or not name:
        raise ConfigError(f"{reference!r} is not `path:name`, for example `rewards.py:exact_match` or `my_package.rewards:exact_match`")
    if new := new_name(reference):
        raise ConfigError(f"{reference} has moved: it is now {new}")
    found = _load_file(Path(path)) if path.endswith(".py") else _load_module(path)
    for depth, part in enumerate(name.split(".")):
        try:
            found = getattr(found, part)
        except AttributeError:
            owner = ":".join(filter(None, (path, ".".join(name.split(".")[:depth]))))
            raise ConfigError(f"{owner} has no {part!r}{_nearest(part, found)}") from None
    return found


def _nearest(name: str, owner: Any) -> str:
    """Suggest, for a message, the name of `owner` that is most like one it does not have, or list all it has."""
    names = [candidate for candidate in dir(owner) if not candidate.startswith("_")]
    lowered = {candidate.lower(): candidate for candidate in reversed(names)}
    near = difflib.get_close_matches(name.lower(), lowered, n=1)
    return f"; did you mean {lowered[near[0]]!r}?" if near else f"; it has {', '.join(names) or 'no names at all'}"


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean X?)`, or nothing where no known word is near."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _load_file(path: Path) -> Any:
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.py")], n=1)
        hint = f"; did you mean {path.with_name(near[0])}?" if near else ""
        raise ConfigError(f"no Python file at {path} (looked from {Path.cwd()}){hint}")
    name = f"pipelinerl_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise anything; it becomes a named error with its cause
        del sys.modules[name]
        raise ConfigError(f"{path} cannot be imported: {_said(error)}") from error
    return module


def _load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # as above
        raise ConfigError(f"module {name} cannot be imported: {_said(error)}") from error


def _said(error: Exception) -> str:
    """An error of somebody's file, and the line of it; a syntax error names its own."""
    where = f"{shown_path(error.filename)}:{error.lineno}" if isinstance(error, SyntaxError) and error.filename else error_of(error).where
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}{f', at {where}' if where else ''}"
