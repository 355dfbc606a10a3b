"""The processes of a run over several nodes, as its supervisors read them, and a look at whether each node has the GPUs for its own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from pipelinerl.config import Config, NodesSection
from pipelinerl.errors import ConfigError
from pipelinerl.launch.gpus import place
from pipelinerl.launch.placement import gpus_on, nodes_of, roles_on
from pipelinerl.launch.roles import Role, roles_of
from pipelinerl.runtime.devices import Gpu


def roles_on_nodes(config: Config, section: NodesSection, run_folder: Path) -> tuple[Role, ...]:
    """The processes of all nodes. Raises `ConfigError` where the settings want what nodes do not give."""
    if config.pipeline.elastic:
        raise ConfigError(
            "pipeline.elastic is true, but the processes of this run are dealt to the nodes of a job, where the trainer keeps the ranks"
            " that the job began with. Leave it out"
        )
    nodes = nodes_of(section)
    return roles_of(config, run_folder, trainer_nodes=len(nodes.trainers), engine_nodes=len(nodes.engines))


def record_roles(config: Config, section: NodesSection, run_folder: Path) -> None:
    """Write `<run>/roles.json`, which the supervisor of each node reads, and the folder of their logs."""
    (run_folder / "logs").mkdir(exist_ok=True)
    roles = [dataclasses.asdict(role) for role in roles_on_nodes(config, section, run_folder)]
    draft = run_folder / "roles.json.draft"
    draft.write_text(json.dumps(roles, indent=1) + "\n")
    draft.rename(run_folder / "roles.json")  # it says that the folder is made: nobody may read half of it


def check_gpus(config: Config, section: NodesSection, *, key: str) -> list[str]:
    """Who takes which GPU of a node, a line each: by indices alone, as no node is known yet. `section` is called `key` in errors.

    Raises `ConfigError` for a node with too few.
    """
    nodes, roles = nodes_of(section), roles_on_nodes(config, section, config.run.folder)
    is_alone, lines = nodes.count == 1, []
    names = (*config.engine.gpus, *config.prm.gpus, *config.trainer.gpus)
    if not all(str(name).isdecimal() for name in names):
        return []  # UUIDs, which nodes compare with their own
    for node in sorted({*nodes.trainers, *nodes.engines}):
        count = gpus_on(node, section)
        gpus = [Gpu(index=index, uuid=f"GPU-{index}", name="of a node", total_bytes=0, free_bytes=0) for index in range(count)]
        if not gpus:  # a node of CPUs
            continue
        here = roles_on(node, [role.name for role in roles], nodes)
        try:
            _, placement = place(config, [role for role in roles if role.name in here], gpus, is_alone=is_alone)
        except ConfigError as error:
            which = "gpus_per_node" if section.engine_gpus_per_node is None or node in nodes.trainers else "engine_gpus_per_node"
            raise ConfigError(f"node {node}, of {key}.{which} = {count}: {error}") from None
        lines += [f"node {node}: GPU {gpu.index}: {users}" for gpu, users in placement.users()]
    return lines
