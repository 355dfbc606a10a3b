"""Engines of a run in a job, or on a machine, of their own: they join one start of the run after the other, until it is finished.

They are the run's by its folder, which both machines see: settings, keys and the address of the orchestrator are there. The run waits at
its start (`engine.ready_deadline_s`) for those that `engine.elsewhere` leaves to others, and not for those that `pipelinerl scale` has let
join. It goes on without them while another engine serves; who takes their place is told the newest policy. Where their job is ended they
leave word of it, and the rollouts that they had are asked of others at once.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.config.file import load_run, with_tensor_parallel
from pipelinerl.errors import ConfigError, PeerGone, PeerSilent
from pipelinerl.launch.gpus import place
from pipelinerl.launch.roles import Role, engines_elsewhere, joined_engines
from pipelinerl.launch.run_folder import is_finished
from pipelinerl.launch.run_launcher import launcher_of
from pipelinerl.runtime.devices import usable_gpus
from pipelinerl.runtime.membership import Gone, Member, ScaleFolder, StartedBy, is_own
from pipelinerl.transport.endpoint import is_listening

LOOK_EVERY_S = 1.0
"""Between two looks for the run's next start. A shared file system tells nobody of a new file."""


def joining_engines(run_folder: Path, part: str, ids: str | None = None) -> tuple[Config, Role]:
    """The engines of part `K/N` of those that a run leaves to others, or those of `ids`, with commas, that were let join it.

    Raises `ConfigError` where it leaves none, and for ids that were not asked for.
    """
    config = load_run(run_folder)
    if ids is not None:
        role = joined_engines(run_folder, members := _asked_for(run_folder, ids))
        size = members[0].tensor_parallel_size
        return config if size is None else with_tensor_parallel(config, size), role
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count) <= max(1, config.engine.elsewhere)):
        raise ConfigError(
            f"--part {part}: expected K/N, part K (from 0) of N, where N is at most engine.elsewhere = {config.engine.elsewhere}"
        )
    if not config.engine.elsewhere:
        raise ConfigError(
            f"{run_folder} leaves no engines to others: engine.elsewhere is 0. Start, or resume, the run with engine.elsewhere=N, how many"
            f" of its {config.engine.count} engines (engine.count) other jobs start; or have engines join it:"
            f" `pipelinerl scale {run_folder} engines=N --elsewhere`"
        )
    return config, engines_elsewhere(config, run_folder, part)


def _asked_for(run_folder: Path, ids: str) -> list[Member]:
    """The engines of `ids`. Raises `ConfigError` for one that nobody has let join, or that others start, and where they have several
    `tensor_parallel_size`."""
    if not all(number.isdecimal() for number in ids.split(",")):
        raise ConfigError(f"--ids {ids}: expected numbers of engines with commas between them, such as 2,3")
    found = [int(number) for number in ids.split(",")]
    record = ScaleFolder(run_folder).members()
    members = [one for one in record.members if one.started_by is StartedBy.JOB and one.request_id] if record is not None else []
    asked = {one.engine_id: one for one in members}
    if others := [number for number in found if number not in asked]:
        raise ConfigError(
            f"--ids {ids}: {', '.join(map(str, others))} was not asked for; jobs may start {', '.join(map(str, asked)) or 'none'}."
            f" `pipelinerl scale {run_folder} engines=N --elsewhere` lets engines join"
        )
    sizes = {number: asked[number].tensor_parallel_size for number in found}
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{engine_id}: {size}" for engine_id, size in sizes.items())
        raise ConfigError(
            f"--ids: these engines have different tensor_parallel_size ({said}). Start those of each in a command of their own"
        )
    return [asked[number] for number in found]


async def join(run_folder: Path, part: str, ids: str | None = None) -> None:
    """Run the engines until the run is finished, or has let go of all of them.

    Raises `PeerGone` where they fail, and `PeerSilent` where the run does not go on.
    """
    before: dict[int, int] | None = None
    while not is_finished(run_folder):
        config, role = joining_engines(run_folder, part, ids)
        if not _is_own(run_folder, role) or role.requests != (before or role.requests):  # the numbers may be another job's by now
            return
        before = role.requests
        roles, _ = place(config, (role,), usable_gpus(), is_alone=False)
        launcher = launcher_of(config, roles, run_folder, lease=None)
        try:
            await launcher.run()
        except PeerGone as error:
            job = f"Slurm job {number}" if (number := os.environ.get("SLURM_JOB_ID")) else f"their command on {os.uname().nodename}"
            why = "was told to end" if launcher.was_interrupted else f"failed: {str(error).partition(chr(10))[0]}"
            for engine_id, request_id in role.requests.items():
                gone = Gone(kind=role.kind, engine_id=engine_id, request_id=request_id, reason=f"{job} {why}")
                ScaleFolder(run_folder).tell_gone(gone)
            raise
        if not is_finished(run_folder):
            await _wait_for_next(run_folder, role, deadline_s=config.engine.ready_deadline_s)


def _is_own(run_folder: Path, role: Role) -> bool:
    """Return whether the run has not let go of all engines of a job."""
    return any(is_own(run_folder, number, StartedBy.JOB, request_id=request) for number, request in role.requests.items())


async def _wait_for_next(run_folder: Path, role: Role, *, deadline_s: float) -> None:
    """Wait until an orchestrator listens again, or the run is finished, or it has let go of these engines."""
    try:
        async with asyncio.timeout(deadline_s):
            while not (is_listening(run_folder / "endpoints" / "engine.json") or is_finished(run_folder)):
                if not _is_own(run_folder, role):
                    return
                await asyncio.sleep(LOOK_EVERY_S)
    except TimeoutError:
        raise PeerSilent(f"waited {deadline_s:g} s for {run_folder} to go on; it was saved, or its orchestrator is gone") from None
