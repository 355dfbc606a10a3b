"""Puts a run on a Ray cluster on disk: the run folder with its keys and config, and the command line of every process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.launch.node_roles import check_gpus, record_roles
from pipelinerl.launch.ray.bundles import Bundle, bundles_of
from pipelinerl.launch.resuming import find_run, make_ready
from pipelinerl.launch.run_folder import make_run_folder
from pipelinerl.runtime.lease import held


def prepare(config: Config, *, resume: str | None) -> Path:
    """Make the run folder, or make the one that `resume` names ready ("": the newest that began), with `roles.json` in it.

    Raises `ConfigError`, and `LeaseError` where the run goes on elsewhere.
    """
    check_gpus(config, config.ray, key="ray")
    found = find_run(config, resume or None) if resume is not None else None
    if found is None:
        run_folder = make_run_folder(config).absolute()
    else:
        run_folder = found.folder.absolute()
        with held(run_folder):
            make_ready(config, run_folder)
    record_roles(config, config.ray, run_folder)
    return run_folder


def bundles_in(run_folder: Path, config: Config) -> tuple[Bundle, ...]:
    """The bundles for the processes that a run folder names."""
    return bundles_of(config.ray, [role["name"] for role in json.loads((run_folder / "roles.json").read_text())])


def command_of(run_folder: Path, attempt: int, node: int) -> tuple[str, ...]:
    """The command line of a node's supervisor."""
    which = ("--run-folder", str(run_folder), "--attempt", str(attempt), "--node", str(node))
    return (sys.executable, "-m", "pipelinerl.launch.ray", *which)
