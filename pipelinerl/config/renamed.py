"""Config keys, and values of closed sets, under the names that they had before.

A user's file with an old name is refused with the new one. `pipelinerl migrate` translates the settings in a run folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipelinerl.runtime.plugin import new_name

KEYS: dict[str, str] = {
    "weights.road": "weights.transport",
    "weights.kv_span": "weights.kv_max_staleness",
    "weights.kv_kl": "weights.kv_max_kl",
    "weights.commit": "weights.swap_mode",
    "prm.stop.below": "prm.early_stop.threshold",
    "prm.stop.keep": "prm.early_stop.keep_probability",
    "prm.stop.min_steps": "prm.early_stop.min_steps",
    "prm.stop.max_right": "prm.early_stop.max_false_stop_fraction",
    "trainer.passes": "trainer.epochs",
    "trainer.recompute": "trainer.activation_checkpointing",
    "model.replay_routes": "model.replay_routing",
    "batch.min_survivors": "batch.min_group_size",
    "pipeline.adaptive_running": "pipeline.adaptive_concurrency",
    "slurm.again": "slurm.at_limit",
}
"""Old dotted key -> new dotted key. A key of an entry of a list, such as `reward.retries`, keeps its section."""


VALUES: dict[str, dict[str | bool, str]] = {
    "trainer.activation_checkpointing": {True: "full", False: "none"},
    "weights.swap_mode": {"flip": "pointer", "scatter": "sparse"},
    "weights.adapters": {"apart": "separate"},
    "slurm.at_limit": {"no": "end"},
    "run.fatal_alarms": {"kv_lag": "stale_kv"},
}
"""Key, under its present name -> old value, or entry of a list -> new value."""


def renamed(key: str) -> str | None:
    """Say what has become of a key, or of a whole section, that went by another name; None where it did not."""
    if key in KEYS:
        return f"{key} is now called {KEYS[key]}"
    moved = [f"{old} is now called {new}" for old, new in KEYS.items() if old.startswith(f"{key}.")]
    return ", ".join(moved) or None


def renamed_value(key: str, value: object) -> str | None:
    """Say what has become of a value of a key; None where it was never one."""
    new = VALUES.get(key, {}).get(value) if isinstance(value, str | bool) else None
    return None if new is None else f'{key} = {json.dumps(value)} is now called "{new}"'


def translate(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an older run under today's names of keys, values and functions."""
    translated: dict[str, Any] = _with_new_functions(tree)
    for old, new in KEYS.items():
        (section, *old_path), (_, *new_path) = old.split("."), new.split(".")
        if isinstance(entries := translated.get(section), list):
            for entry in entries:
                _move(entry, old_path, new_path)
        else:
            _move(translated, old.split("."), new.split("."))
    for key, new_values in VALUES.items():
        *sections, name = key.split(".")
        section: Any = translated
        for part in sections:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict) and name in section:
            section[name] = _with_new_values(section[name], new_values)
    return translated


def _with_new_values(value: Any, new_values: Mapping[str | bool, str]) -> Any:
    if isinstance(value, list):
        return [_with_new_values(one, new_values) for one in value]
    return new_values.get(value, value) if isinstance(value, str | bool) else value


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
