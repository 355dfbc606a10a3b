"""The launcher of a run, with what the run's settings allow it: restarts, engines that join, another number of trainer ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.config.file import with_tensor_parallel
from pipelinerl.launch.gpus import place_joined, place_reward_process
from pipelinerl.launch.launcher import Launcher
from pipelinerl.launch.roles import Role, joined_engines, prm_engine
from pipelinerl.launch.trainer_starts import dealt_gpus, gone_engines, starts_of
from pipelinerl.runtime.devices import usable_gpus
from pipelinerl.runtime.early import EarlyProcesses
from pipelinerl.runtime.lease import Lease
from pipelinerl.runtime.membership import DealtGpu, DealtGpus, Kind, Member, ScaleFolder, StartedBy, is_reward
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
    if lease is not None:
        ScaleFolder(run_folder).forget_dealt()  # whom a launcher before this one had dealt a GPU is dealt another
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


def _joined(config: Config, run_folder: Path, kind: str, member: Member, others: Iterable[Role]) -> Role | None:
    """The role of an engine that joins a run on this machine; None for a process of a reward model, which the scorer starts once it was
    dealt a GPU. Raises `ConfigError` where there is no GPU for it."""
    gone, dealt, engine_id = gone_engines(run_folder), dealt_gpus(run_folder), member.engine_id
    if is_reward(kind):
        gpu = place_reward_process(config, others, usable_gpus(), gone=gone, dealt=dealt.values())
        new = DealtGpu(kind=kind, number=engine_id, request_id=member.request_id, gpu=gpu)
        ScaleFolder(run_folder).deal(DealtGpus(dealt=(*dealt, new)))
        return None
    if kind == Kind.PRM:
        role = prm_engine(run_folder, engine_id, started_by=StartedBy.LAUNCHER, request_id=member.request_id)
    else:
        size, role = member.tensor_parallel_size, joined_engines(run_folder, [member])
        config = config if size is None else with_tensor_parallel(config, size)
    return place_joined(config, role, others, usable_gpus(), gone=gone, dealt=dealt.values())
