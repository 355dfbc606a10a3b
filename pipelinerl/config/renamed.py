"""Config keys under the names that they had before.

A user's file with an old name is refused with the new one. `pipelinerl migrate` translates the settings in a run folder.
"""

from __future__ import annotations

from typing import Any

from pipelinerl.runtime.plugin import new_name

KEYS: dict[str, str] = {}
"""Old dotted key -> new dotted key. A key of an entry of a list, such as `reward.retries`, keeps its section."""


def renamed(key: str) -> str | None:
    """Say what has become of a key, or of a whole section, that went by another name; None where it did not."""
    if key in KEYS:
        return f"{key} is now called {KEYS[key]}"
    moved = [f"{old} is now called {new}" for old, new in KEYS.items() if old.startswith(f"{key}.")]
    return ", ".join(moved) or None


def translate(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an older run under today's names of keys and functions."""
    translated: dict[str, Any] = _with_new_functions(tree)
    for old, new in KEYS.items():
        (section, *old_path), (_, *new_path) = old.split("."), new.split(".")
        if isinstance(entries := translated.get(section), list):
            for entry in entries:
                _move(entry, old_path, new_path)
        else:
            _move(translated, old.split("."), new.split("."))
    return translated


def _move(tree: dict[str, Any], old: list[str], new: list[str]) -> None:
    value = _take(tree, old)
    if value is not _ABSENT:
        *sections, name = new
        for section in sections:
            tree = tree.setdefault(section, {})
        tree[name] = value


def _take(tree: dict[str, Any], path: list[str]) -> Any:
    """Remove a key and return its value; sections that it leaves empty go, too, since they would be refused as unknown."""
    name, *rest = path
    if not rest or name not in tree:
        return tree.pop(name, _ABSENT)
    value = _take(tree[name], rest)
    if value is not _ABSENT and not tree[name]:
        del tree[name]
    return value


def _with_new_functions(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_new_functions(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_with_new_functions(one) for one in value]
    return new_name(value) or value if isinstance(value, str) else value


_ABSENT = object()
