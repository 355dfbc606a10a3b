"""Puts a run's Slurm job on disk: the run folder with its keys and config, the script, and the command line of every process."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.errors import ConfigError, PeerRefused
from pipelinerl.launch.gpus import place
from pipelinerl.launch.roles import Role, roles_of
from pipelinerl.launch.run_folder import make_run_folder
from pipelinerl.launch.slurm.placement import nodes_of, roles_on
from pipelinerl.launch.slurm.script import render
from pipelinerl.runtime.devices import Gpu


def prepare(config: Config) -> Path:
    """Make the run folder, with `job.sbatch` and `roles.json` in it, and return the script's path."""
    render(config, run_folder=config.run.folder, python=sys.executable)  # what is refused leaves no folder behind
    check_gpus(config)
    run_folder = make_run_folder(config).absolute()
    (run_folder / "logs").mkdir()
    roles = [dataclasses.asdict(role) for role in _roles(config, run_folder)]
    (run_folder / "roles.json").write_text(json.dumps(roles, indent=1) + "\n")
    script = run_folder / "job.sbatch"
    script.write_text(render(config, run_folder=run_folder, python=sys.executable))
    return script


def check_gpus(config: Config) -> list[str]:
    """Who takes which GPU of `slurm.gpus_per_node`, a line each: by indices alone, as no node is known yet.

    Raises `ConfigError` for a node with too few.
    """
    nodes, roles = nodes_of(config.slurm), _roles(config, config.run.folder)
    is_alone, lines = nodes.count == 1, []
    gpus = [
        Gpu(index=index, uuid=f"GPU-{index}", name="of a node", total_bytes=0, free_bytes=0) for index in range(config.slurm.gpus_per_node)
    ]
    names = (*config.engine.gpus, *config.prm.gpus, *config.trainer.gpus)
    if not gpus or not all(str(name).isdecimal() for name in names):
        return []  # nodes of CPUs; or UUIDs, which nodes compare with their own
    for node in sorted({*nodes.trainers, *nodes.engines}):
        here = roles_on(node, [role.name for role in roles], nodes)
        try:
            _, placement = place(config, [role for role in roles if role.name in here], gpus, is_alone=is_alone)
        except ConfigError as error:
            raise ConfigError(f"node {node}, of slurm.gpus_per_node = {len(gpus)}: {error}") from None
        lines += [f"node {node}: GPU {gpu.index}: {users}" for gpu, users in placement.users()]
    return lines


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
