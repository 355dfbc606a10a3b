"""Puts a run's Slurm job on disk: the run folder with its keys and config, the script, and the command line of every process."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.errors import ConfigError, PeerRefused
from pipelinerl.launch.roles import Role, roles_of
from pipelinerl.launch.run_folder import make_run_folder
from pipelinerl.launch.slurm.placement import nodes_of
from pipelinerl.launch.slurm.script import render


def prepare(config: Config) -> Path:
    """Make the run folder, with `job.sbatch` and `roles.json` in it, and return the script's path."""
    render(config, run_folder=config.run.folder, python=sys.executable)  # what is refused leaves no folder behind
    run_folder = make_run_folder(config).absolute()
    (run_folder / "logs").mkdir()
    roles = [dataclasses.asdict(role) for role in _roles(config, run_folder)]
    (run_folder / "roles.json").write_text(json.dumps(roles, indent=1) + "\n")
    script = run_folder / "job.sbatch"
    script.write_text(render(config, run_folder=run_folder, python=sys.executable))
    return script


def submit(script: Path) -> str:
    """Hand the script to sbatch and return the job's id. Raises `PeerRefused` with sbatch's own words."""
    try:
        told = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(f"no sbatch on this machine: submit {script} where Slurm is") from None
    if told.returncode:
        raise PeerRefused(f"sbatch refused {script}: {told.stderr.strip()}")
    return told.stdout.strip().partition(";")[0]


def _roles(config: Config, run_folder: Path) -> tuple[Role, ...]:
    nodes = nodes_of(config.slurm)
    return roles_of(config, run_folder, trainer_nodes=len(nodes.trainers), engine_nodes=len(nodes.engines))
