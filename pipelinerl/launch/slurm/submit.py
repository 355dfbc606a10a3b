"""Puts a run's Slurm job on disk: the run folder with its keys and config, the script, and the command line of every process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.errors import ConfigError, PeerRefused
from pipelinerl.launch.node_roles import check_gpus, record_roles
from pipelinerl.launch.run_folder import make_run_folder
from pipelinerl.launch.slurm.script import render


def prepare(config: Config) -> Path:
    """Make the run folder, with `job.sbatch` and `roles.json` in it, and return the script's path."""
    render(config, run_folder=config.run.folder, python=sys.executable)  # what is refused leaves no folder behind
    check_gpus(config, config.slurm, key="slurm")
    run_folder = make_run_folder(config).absolute()
    record_roles(config, config.slurm, run_folder)
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
