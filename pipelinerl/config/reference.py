"""The page `docs/config.md`: every key of a config, with its type, its default and what it means, written from the code.

`pipelinerl keys --markdown > docs/config.md` makes it anew; a test fails where it is not current.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pipelinerl.config.file import described_keys

_INTRODUCTION = """\
# Config reference

Every key of a config. This page is written from the code by `pipelinerl keys --markdown`; `pipelinerl keys` prints the same in a terminal.

A config is one TOML file with a section for each part; `[[reward]]` may stand several times. Any key can be changed on the command line,
in TOML's syntax: `pipelinerl run my.toml trainer.steps=200 'engine.cores=[0]'`. Paths are relative to the folder the command is run in. An
unknown key, a value out of its bounds and sections that contradict each other are refused, all at once; a dry run also says
which settings would have no effect.
"""


_ENDINGS = {"per_s": "1/s", "_s": "s", "_bytes": "bytes", "_tokens": "tokens", "_steps": "steps", "_fraction": "part of one", "_kl": "nats"}
"""Ending of a key's name -> unit."""
UNITS = {
    **dict.fromkeys(("group_size", "max_running"), "rollouts"),
    **dict.fromkeys(("groups_per_step", "record_groups"), "groups"),
    **dict.fromkeys(("concurrency", "slots"), "calls"),
    **dict.fromkeys(("ranks", "shard", "context", "tensor", "pipeline", "expert"), "ranks"),
    **dict.fromkeys(("trainer_nodes", "engine_nodes", "scorer_nodes"), "nodes"),
    **dict.fromkeys(("steps", "every"), "steps"),
    **dict.fromkeys(("max_staleness", "kv_max_staleness", "adapter_versions"), "versions"),
    **dict.fromkeys(("restarts", "retries"), "tries"),
    "batch_size": "rows",
    "correct_reward": "reward",
    "count": "engines",
    "cpus_per_node": "cores",
    "epochs": "passes",
    "gpus_per_node": "GPUs",
    "keep": "checkpoints",
    "keep_probability": "probability",
    "max_logprob_gap": "nats",
    "max_turns": "turns",
    "min_group_size": "rollouts",
    "samples": "answers",
    "threshold": "score",
}
"""Last name of a key -> unit, where its ending does not say it."""


def markdown() -> str:
    """The page."""
    return "\n".join((_INTRODUCTION, *_sections()))


def _sections() -> Iterator[str]:
    for section, rows in itertools.groupby(described_keys(), key=lambda row: row[0].partition(".")[0]):
        yield f"## {'`[[reward]]`' if section == 'reward' else f'`[{section}]`'}\n"
        yield "| key | type | default | unit | meaning |\n| --- | --- | --- | --- | --- |"
        yield from (
            f"| `{key}` | {_cell(kind)} | {_code(default)} | {unit_of(key, kind)} | {_cell(meaning) or _plain(key)} |"
            for key, kind, default, meaning in rows
        )
        yield ""


def unit_of(key: str, kind: str) -> str:
    """The unit of a number, by the last name of its key; empty where it has none, as a coefficient."""
    if not kind.startswith(("integer", "number")):
        return ""
    name = key.rpartition(".")[2]
    return UNITS.get(name) or next((unit for ending, unit in _ENDINGS.items() if name.endswith(ending)), "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _code(default: str) -> str:
    return default if default in ("none", "required") else f"`{_cell(default)}`"


def _plain(key: str) -> str:
    """Describe a key by its name where it has no description."""
    return key.rpartition(".")[2].replace("_", " ")
