"""Engines of a run in a job, or on a machine, of their own: they join one start of the run after the other, until it is finished.

They are the run's by its folder, which both machines see: settings, keys and the address of the orchestrator are there. The run waits for
them at its start (`engine.ready_deadline_s`), and goes on without them while another engine serves; who takes their place is told the
newest policy.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.config.file import load_run
from pipelinerl.errors import ConfigError, PeerSilent
from pipelinerl.launch.gpus import place
from pipelinerl.launch.launcher import launcher_of
from pipelinerl.launch.roles import Role, engines_elsewhere
from pipelinerl.launch.run_folder import is_finished
from pipelinerl.runtime.devices import usable_gpus
from pipelinerl.transport.endpoint import is_listening

LOOK_EVERY_S = 1.0
"""Between two looks for the run's next start. A shared file system tells nobody of a new file."""


def joining_engines(run_folder: Path, part: str) -> tuple[Config, Role]:
    """The engines of part `K/N` of those that a run leaves to others. Raises `ConfigError` where it leaves none."""
    config = load_run(run_folder)
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count) <= max(1, config.engine.elsewhere)):
        raise ConfigError(
            f"--part {part}: expected K/N, part K (from 0) of N, where N is at most engine.elsewhere = {config.engine.elsewhere}"
        )
    if not config.engine.elsewhere:
        raise ConfigError(
            f"{run_folder} leaves no engines to others: engine.elsewhere is 0. Start, or resume, the run with engine.elsewhere=N, how many"
            f" of its {config.engine.count} engines (engine.count) other jobs start"
        )
    return config, engines_elsewhere(config, run_folder, part)


async def join(run_folder: Path, part: str) -> None:
    """Run the engines until the run is finished. Raises `PeerGone` where they fail, and `PeerSilent` where the run does not go on."""
    while not is_finished(run_folder):
        config, role = joining_engines(run_folder, part)
        roles, _ = place(config, (role,), usable_gpus(), is_alone=False)
        await launcher_of(config, roles, run_folder, lease=None).run()
        if not is_finished(run_folder):
            await _wait_for_next(run_folder, deadline_s=config.engine.ready_deadline_s)


async def _wait_for_next(run_folder: Path, *, deadline_s: float) -> None:
    """Wait until an orchestrator listens again, or the run is finished."""
    try:
        async with asyncio.timeout(deadline_s):
            while not (is_listening(run_folder / "endpoints" / "engine.json") or is_finished(run_folder)):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_EVERY_S)
    except TimeoutError:
        raise PeerSilent(f"waited {deadline_s:g} s for {run_folder} to go on; it was saved, or its orchestrator is gone") from None
