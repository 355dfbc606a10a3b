"""The processes of a run over several nodes, as its supervisors read them, and a look at whether each node has the GPUs for its own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from pipelinerl.config import Config, NodesSection
from pipelinerl.errors import ConfigError
from pipelinerl.launch.gpus import place
from pipelinerl.launch.placement import nodes_of, roles_on
from pipelinerl.launch.roles import Role, roles_of
from pipelinerl.runtime.devices import Gpu


def roles_on_nodes(config: Config, section: NodesSection, run_folder: Path) -> tuple[Role, ...]:
    """The processes of all nodes."""
    nodes = nodes_of(section)
    return roles_of(config, run_folder, trainer_nodes=len(nodes.trainers), engine_nodes=len(nodes.engines))


def record_roles(config: Config, section: NodesSection, run_folder: Path) -> None:
    """Write `<run>/roles.json`, which the supervisor of each node reads, and the folder of their logs."""
    (run_folder / "logs").mkdir(exist_ok=True)
    roles = [dataclasses.asdict(role) for role in roles_on_nodes(config, section, run_folder)]
    (run_folder / "roles.json").write_text(json.dumps(roles, indent=1) + "\n")


def check_gpus(config: Config, section: NodesSection, *, key: str) -> list[str]:
    """Who takes which GPU of a node, `section.gpus_per_node` (`key`, for errors), a line each: by indices alone, as no node is known yet.

    Raises `ConfigError` for a node with too few.
    """
    nodes, roles = nodes_of(section), roles_on_nodes(config, section, config.run.folder)
    is_alone, lines = nodes.count == 1, []
    gpus = [Gpu(index=index, uuid=f"GPU-{index}", name="of a node", total_bytes=0, free_bytes=0) for index in range(section.gpus_per_node)]
    names = (*config.engine.gpus, *config.prm.gpus, *config.trainer.gpus)
    if not gpus or not all(str(name).isdecimal() for name in names):
        return []  # nodes of CPUs; or UUIDs, which nodes compare with their own
    for node in sorted({*nodes.trainers, *nodes.engines}):
        here = roles_on(node, [role.name for role in roles], nodes)
        try:
            _, placement = place(config, [role for role in roles if role.name in here], gpus, is_alone=is_alone)
        except ConfigError as error:
            raise ConfigError(f"node {node}, of {key} = {len(gpus)}: {error}") from None
        lines += [f"node {node}: GPU {gpu.index}: {users}" for gpu, users in placement.users()]
    return lines
