"""Reads the settings from a TOML file and `section.key=value` overrides; tells every problem at once, with its path and nearest name."""

from __future__ import annotations

import contextlib
import difflib
import json
import tomllib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pydantic

from pipelinerl.config import Config, Section
from pipelinerl.contradictions import contradictions
from pipelinerl.errors import ConfigError


def load(path: Path, *, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML config and apply `section.key=value` overrides (values in TOML syntax; a bare word is a string).

    Relative paths in the file stay relative to the working directory. Raises `ConfigError` listing every problem at once.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no config file at {path}: name an existing TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for override in overrides:
        _apply(tree, override)
    return parse(tree, origin=str(path))


def load_run(run_folder: Path, *, overrides: Sequence[str] = ()) -> Config:
    """The settings of a run, some of them changed. Raises `ConfigError`."""
    path = run_folder / "config.json"
    try:
        tree = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a run's settings: {error}; name the folder of a run") from None
    for override in overrides:
        _apply(tree, override)
    return parse(tree, origin=str(path))


def parse(tree: dict[str, Any], *, origin: str) -> Config:
    """Validate a plain dictionary of sections. Raises `ConfigError` listing every problem at once; `origin` names the file."""
    try:
        return Config.model_validate(tree)
    except pydantic.ValidationError as error:
        problems = [line for item in error.errors() for line in _describe(item, others=error.errors())]
        if any(item["loc"] for item in error.errors()):  # then pydantic did not come to compare the sections
            problems += contradictions(_valid_sections(tree))
        plural = "problem" if len(problems) == 1 else "problems"
        raise ConfigError(f"{origin}: {len(problems)} {plural}\n" + "\n".join(f"  - {line}" for line in problems)) from None


def known_keys(model: type[pydantic.BaseModel] = Config, prefix: str = "") -> dict[str, str]:
    """Every dotted key with its description; the list that documentation and tests hold."""
    keys: dict[str, str] = {}
    for name, field in model.model_fields.items():
        inner = _section_of(field.annotation)
        if inner is None:
            keys[prefix + name] = field.description or ""
        else:
            keys |= known_keys(inner, f"{prefix}{name}.")
    return keys


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r} is not `section.key=value`, for example `trainer.steps=10`")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        value = text
    node = tree
    for part in parts[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {part} is a value, not a section")
    node[parts[-1]] = value


def _valid_sections(tree: dict[str, Any]) -> dict[str, Any]:
    """The sections without a problem of their own, where others have one."""
    valid = {}
    for name, field in Config.model_fields.items():
        with contextlib.suppress(pydantic.ValidationError):
            valid[name] = pydantic.TypeAdapter[Any](field.annotation or Any).validate_python(tree.get(name, {}))
    return valid


def _describe(item: Any, *, others: list[Any]) -> list[str]:
    path = ".".join(str(part) for part in item["loc"])
    key = ".".join(part for part in item["loc"] if isinstance(part, str))
    if item["type"] == "extra_forbidden":
        section, _, _ = key.rpartition(".")
        siblings = [known for known in (*known_keys(), *Config.model_fields) if known.rpartition(".")[0] == section]
        near = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6 if not section else 0.8)
        return [f"{path} is not a known key" + (f"; did you mean {near[0]}?" if near else "")]
    if item["type"] == "missing":
        return [f"{path} is missing: {known_keys().get(key) or 'it has no default'}"]
    if item["type"] == "value_error":
        return str(item["ctx"]["error"]).splitlines()
    if item["type"] == "too_short" and any(len(other["loc"]) > len(item["loc"]) and other["loc"][0] == item["loc"][0] for other in others):
        return []  # its entries are there, and what is wrong with them is said
    return [f"{path} is {item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}"]


def _section_of(annotation: Any) -> type[pydantic.BaseModel] | None:
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None
