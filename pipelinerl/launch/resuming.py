"""Finds the run that `--resume` goes on with, and makes its folder ready.

It is the newest one of the name that really began, that is, has a checkpoint or admitted a rollout; starts that failed are passed over. Or
the one that was named, by its folder or by the folder's name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sqlite3
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.config.file import load_run, write_run
from pipelinerl.errors import ConfigError
from pipelinerl.launch.roles import peers_of
from pipelinerl.launch.run_folder import SCRIPT_FILE, SERVING_FILE, folders_of, forget_endpoints, policy_folders
from pipelinerl.storage.schema import refusal
from pipelinerl.transport.keys import make_keys

FIXED_KEYS = (
    "run.seed",
    "model.path",
    "model.dtype",
    "data.source",
    "data.shuffle",
    "data.limit",
    "data.prompt_column",
    "data.chat",
    "data.system_prompt",
    "data.tools",
    "data.chat_template_kwargs",
    "rollout.group_size",
    "rollout.temperature",
    "rollout.stop",
    "rollout.stop_token_ids",
    "batch.groups_per_step",
    "batch.max_tokens",
    "sft.completion_column",
    "sft_stream.source",
    "sft_stream.batch_size",
)
"""Keys that a resumed run must share with its earlier life: the order of its prompts and demonstrations, what a prompt and the end of a
completion are (siblings of one group are compared, and some may be sampled after the resume), and what its recorded groups and rows look
like, whose log-probabilities the trainer compares at its own `rollout.temperature`.

What may change, among others: rewards and the environment, as code that was mended; `rollout.max_tokens`, `data.difficulty` and
`algorithm.correct_reward`, which are about what comes; `sft_stream.coef`, as other coefficients; the method, as far as its groups have as
many siblings; every size and deadline.
"""
SERVED_KEYS = ("run.seed", "model.path", "model.dtype", "lora.rank", "lora.alpha", "lora.targets", "batch.max_tokens")
"""Keys that a resumed server must share with its earlier life: what its models are, and how a pass over data is computed again."""
FROZEN_KEYS = ("model.path", "model.dtype")
"""Keys that a frozen policy must share with its earlier life."""
SHOWN = 100
"""Characters of each of two long values that differ, from a little before they do."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The run that `--resume` means."""

    folder: Path
    num_passed_over: int = 0
    """Newer folders of the same name in which no run began."""

    def __str__(self) -> str:
        passed_over = self.num_passed_over
        newer = f" ({passed_over} newer {'start' if passed_over == 1 else 'starts'} of that name never began)" if passed_over else ""
        return f"{self.folder}, going on{newer}"


class RunCommand(TyperCommand):
    """A command whose `--resume` may stand with a run's name behind it, or by itself."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = []
        for word, following in itertools.zip_longest(args, args[1:], fillvalue="--"):
            words.append(word)
            # What follows is another option, an override, or the settings: no run was named.
            if word == "--resume" and (following.startswith("-") or "=" in following or following.endswith(".toml")):
                words.append("")
        return super().parse_args(ctx, words)


def find_run(config: Config, name: str | None = None) -> Found | None:
    """The run of that folder or name; else the newest one of `run.name` that began, or None where there is none.

    Raises `ConfigError` where no run has that name, or the one that has it never began.
    """
    if name is not None:
        return Found(folder=_named(config, name))
    folders = sorted(folders_of(config, "config.json"), key=_last_written)
    for number, folder in enumerate(reversed(folders)):
        if has_begun(folder):
            return Found(folder=folder, num_passed_over=number)
    return None


def find_server(config: Config, name: str | None = None) -> Path | None:
    """The server's folder of that name; else the newest one of `run.name`, or None where there is none. Raises `ConfigError`."""
    found = sorted(folders_of(config, SERVING_FILE), key=_last_written)
    if name is None:
        return found[-1] if found else None
    for folder in found:
        if folder.name == name or folder.absolute() == Path(name).absolute():
            return folder
    known = ", ".join(folder.name for folder in found) or "none"
    raise ConfigError(f"--resume {name}: no server of that folder or name in {config.run.folder}; there are: {known}")


def make_frozen_ready(config: Config, run_folder: Path) -> None:
    """Make the folder of a frozen policy ready to go on. Raises `ConfigError` where it would be another model."""
    before = load_run(run_folder)
    _refuse([key for key in FROZEN_KEYS if _value_of(before, key) != _value_of(config, key)], config, before, run_folder)
    _forget_processes(config, run_folder)


def make_server_ready(config: Config, run_folder: Path) -> None:
    """Make a server's folder ready to go on; only who holds its lease may. Raises `ConfigError` where its models would be others."""
    before = load_run(run_folder)
    _refuse([key for key in SERVED_KEYS if _value_of(before, key) != _value_of(config, key)], config, before, run_folder)
    _forget_processes(config, run_folder)


def has_begun(run_folder: Path) -> bool:
    """Return whether there is anything to go on with: a checkpoint, or a rollout that was admitted, of any policy."""
    if any(map(has_begun, policy_folders(run_folder))):
        return True
    if list(run_folder.glob("checkpoints/step-*/manifest.json")):
        return True
    path = run_folder / "ledger.sqlite"
    if not path.exists():
        return False
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as ledger:
            return ledger.execute("SELECT 1 FROM events WHERE kind = 'admitted' LIMIT 1").fetchone() is not None
    except sqlite3.Error:
        return path.stat().st_size > 0  # damaged, or another version's: resuming it says which


def make_ready(config: Config, run_folder: Path, *, in_script: bool = False) -> None:
    """Make a run's folder ready to go on with the present settings; only who holds its lease may. `in_script`: a script goes on.

    Raises `ConfigError` for settings that a run cannot change: its ledger would not fit them; for fewer steps than it has trained; for a
    folder of another schema; and where a config would go on with a script's run, or a script with a config's.
    """
    _check_schema(run_folder / "ledger.sqlite")
    if (run_folder / SCRIPT_FILE).exists() != in_script:
        how = "a script" if not in_script else "`pipelinerl run`"
        what = "start that script again, with resume=True" if not in_script else "go on with `pipelinerl run --resume`"
        raise ConfigError(f"{run_folder} is a run that {how} has begun: {what}, or start a new run")
    if (num_trained := _num_trained(run_folder / "ledger.sqlite")) > config.trainer.steps:
        raise ConfigError(
            f"trainer.steps is {config.trainer.steps}, and {run_folder} has trained {num_trained}: raise it, or start a new run"
        )
    before = load_run(run_folder)
    if before.policies:
        raise ConfigError(f"{run_folder} is a run of several policies ({', '.join(before.policies)}): go on with `pipelinerl.Policies`")
    changed = [key for key in FIXED_KEYS if _value_of(before, key) != _value_of(config, key)]
    if method_of(before).adds_greedy != method_of(config).adds_greedy:  # its groups have one sibling more
        changed.append("algorithm.name")
    _refuse(changed, config, before, run_folder)
    _forget_processes(config, run_folder)


def _refuse(changed: list[str], config: Config, before: Config, run_folder: Path) -> None:
    if changed:
        changes = "\n".join(f"  - {key} {_difference(_value_of(before, key), _value_of(config, key))}" for key in changed)
        raise ConfigError(f"{run_folder} cannot go on with other settings than it began with:\n{changes}\nKeep them, or start a new run.")


def _forget_processes(config: Config, run_folder: Path) -> None:
    write_run(run_folder, config)
    make_keys(run_folder, peers_of(config))
    for path in (run_folder / "failures").glob("*.json"):
        path.unlink()
    forget_endpoints(run_folder)


def _named(config: Config, name: str) -> Path:
    candidates = (Path(name), config.run.folder / name)
    folder = next((path for path in candidates if (path / "config.json").exists()), None)
    if folder is None:
        known = sorted(
            (path.parent for path in config.run.folder.glob("*/config.json") if (path.parent / "keys").is_dir()), key=_last_written
        )
        hint = f"; the newest in {config.run.folder} are {', '.join(path.name for path in known[-3:])}" if known else ""
        raise ConfigError(f"--resume {name}: no run is there, neither at {candidates[0]} nor at {candidates[1]}{hint}")
    if not has_begun(folder):
        raise ConfigError(
            f"--resume {name}: that run never began: it has no checkpoint and admitted no rollout. Start a new one without --resume"
        )
    return folder


def _check_schema(path: Path) -> None:
    """Refuse another version's ledger before anything is started; what cannot be read of it is said by who reads it."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as ledger:
        if (reason := refusal(ledger.execute("PRAGMA user_version").fetchone()[0], what=str(path))) is not None:
            raise ConfigError(reason)


def _num_trained(path: Path) -> int:
    """Return how many steps a ledger has as trained; 0 where it cannot be read, which is said by who opens it."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as ledger:
        (newest,) = ledger.execute("SELECT max(step) FROM events WHERE kind = 'done' AND rollout_id IS NULL").fetchone()
        return 0 if newest is None else newest + 1
    return 0


def _last_written(run_folder: Path) -> float:
    names = ("config.json", "ledger.sqlite", "ledger.sqlite-wal")
    return max((run_folder / name).stat().st_mtime for name in names if (run_folder / name).exists())


def _difference(before: Any, after: Any) -> str:
    old, new = repr(before), repr(after)
    num_same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))
    start = max(0, num_same - SHOWN // 5) if max(len(old), len(new)) > SHOWN else 0

    def shown(text: str) -> str:
        return "..." * (start > 0) + text[start : start + SHOWN] + "..." * (start + SHOWN < len(text))

    return f"was {shown(old)}, and is {shown(new)}"


def _value_of(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)
