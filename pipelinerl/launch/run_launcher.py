"""The launcher of a run, with what the run's settings allow it: restarts, engines that join, another number of trainer ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.config.file import with_tensor_parallel
from pipelinerl.launch.gpus import place_joined
from pipelinerl.launch.launcher import Launcher
from pipelinerl.launch.roles import Role, joined_engines, prm_engine
from pipelinerl.launch.trainer_starts import gone_engines, starts_of
from pipelinerl.runtime.devices import usable_gpus
from pipelinerl.runtime.early import EarlyProcesses
from pipelinerl.runtime.lease import Lease
from pipelinerl.runtime.membership import Kind, ScaleFolder, StartedBy
from pipelinerl.runtime.restarts import Restarts


def launcher_of(
    config: Config,
    roles: tuple[Role, ...],
    run_folder: Path,
    *,
    lease: Lease | None,
    early: EarlyProcesses | None = None,
    is_orchestrator: bool = False,
) -> Launcher:
    """Return the launcher of a run, with what its settings allow it. One with a `lease` starts engines that join the run later, too."""
    return Launcher(
        roles,
        run_folder,
        joined=None if lease is None else functools.partial(_joined, config, run_folder),
        trainers=None if lease is None else starts_of(config, run_folder, roles),
        restarts=Restarts(budget=config.run.restarts, first_wait_s=config.run.restart_wait_s),
        stopped_limit_s=config.pipeline.stall_limit_s,
        lease=lease,
        early=early,
        is_orchestrator=is_orchestrator,
    )


def _joined(config: Config, run_folder: Path, kind: Kind, engine_id: int, others: Iterable[Role]) -> Role:
    """The role of an engine that joins a run on this machine. Raises `ConfigError` where there is no GPU for it."""
    if kind is Kind.PRM:
        role = prm_engine(run_folder, engine_id, started_by=StartedBy.LAUNCHER)
    else:
        size = ScaleFolder(run_folder).tensor_parallel_size(engine_id)
        role = joined_engines(run_folder, [engine_id], started_by=StartedBy.LAUNCHER, tensor_parallel_size=size)
        config = config if size is None else with_tensor_parallel(config, size)
    return place_joined(config, role, others, usable_gpus(), gone=gone_engines(run_folder))
