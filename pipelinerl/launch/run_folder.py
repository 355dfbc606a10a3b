"""A run's folder: made before its processes start, cleaned of what an orchestrator that is gone has published."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.config.file import write_run
from pipelinerl.errors import ConfigError
from pipelinerl.launch.roles import peers_of
from pipelinerl.transport.keys import make_keys

GATEWAY_FILE = "gateway.json"
"""In the run folder, for its owner only: where the gateway listens, and the token of the run; both stay when it starts again."""

TINKER_FILE = "tinker.json"
"""The same, of a server of training loops, with the key that clients need."""
SERVING_FILE = "serving.sqlite"
"""What a server owes its clients; see `pipelinerl.tinker.ledger`."""
SCRIPT_FILE = "script.json"
"""In the folder of a run that a script drives: its command line."""
POLICIES = "policies"
"""In the folder of a run with several policies: a run folder for each."""


def make_run_folder(config: Config) -> Path:
    """Make `<run.folder>/<run.name>-<time>`, with the resolved config and fresh keys in it, readable by its owner only.

    Raises `ConfigError` where it cannot be made or written: a file in its place, no permission, no room.
    """
    try:
        config.run.folder.mkdir(parents=True, exist_ok=True)
        return _make_run_folder(config)
    except OSError as error:
        raise ConfigError(
            f"run.folder {config.run.folder}: no run can be kept there: {error.strerror or error}"
            f" ({error.filename or config.run.folder}). Name a folder that you may write to and that has room, with run.folder=..."
        ) from error


def name_now(config: Config) -> str:
    """A run's name with the time."""
    return f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def fill(folder: Path, config: Config) -> None:
    """Make a run folder of a name: the resolved config and fresh keys, readable by its owner only. Raises `OSError`."""
    folder.mkdir(mode=0o700, parents=True)
    write_run(folder, config)
    make_keys(folder, peers_of(config))


def folders_of(config: Config, holding: str) -> list[Path]:
    """The run folders of `run.name` that hold a file, in no order; none of a longer name (`demo-2` beside `demo`)."""
    is_one = re.compile(rf"{re.escape(config.run.name)}-\d{{8}}-\d{{6}}(-\d+)?").fullmatch
    return [path.parent for path in config.run.folder.glob(f"*/{holding}") if is_one(path.parent.name)]


def _make_run_folder(config: Config) -> Path:
    name = name_now(config)
    for number in itertools.count(1):
        folder = config.run.folder / (f"{name}-{number}" if number > 1 else name)
        try:
            fill(folder, config)
        except FileExistsError:
            if not folder.is_dir():
                raise
            continue  # another run began in the same second
        return folder
    raise AssertionError("numbers do not end")


def folder_of_policy(run_folder: Path, name: str) -> Path:
    """The folder of one policy in that of a run with several."""
    return run_folder / POLICIES / name


def policy_folders(run_folder: Path) -> tuple[Path, ...]:
    """The folders of the policies of a run with several; none where it has one, whose folder is the run's."""
    return tuple(sorted(path.parent for path in (run_folder / POLICIES).glob("*/config.json")))


def is_finished(run_folder: Path) -> bool:
    """Return whether the run had come to its end before it was asked to save."""
    journal = run_folder / "journal" / "orchestrator.jsonl"
    last = journal.read_bytes().splitlines()[-1:] if journal.exists() else []
    return any(b'"kind": "end"' in line and b'"reason": "finished"' in line for line in last)


def forget_endpoints(run_folder: Path) -> None:
    """Remove what an orchestrator that is gone has published: who starts now must wait for the next one's."""
    for path in (run_folder / "endpoints").glob("*.json"):
        path.unlink()


def needed_by_agents(run_folder: Path) -> tuple[str, ...]:
    """Return the lines that tell what an agent needs to play a run's rollouts; its gateway listens."""
    listens = json.loads((run_folder / GATEWAY_FILE).read_text())
    return (
        "agents play this run's rollouts (docs/agents.md); they need:",
        f"  export PIPELINERL_GATEWAY={listens['address']}",
        f"  export PIPELINERL_GATEWAY_TOKEN={listens['token']}",
    )
