"""Where a run listens, and where it is kept: looked at before anything starts.

A process that cannot listen says so itself, once the models of others are loaded; here it is said within a second. A dry run may be made on
another machine than the run, so what this one lacks is a note there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from pipelinerl.config import Config
from pipelinerl.errors import ConfigError
from pipelinerl.launch import doctor
from pipelinerl.runtime.findings import Finding, Level
from pipelinerl.runtime.machine import has_gpu
from pipelinerl.runtime.network import address_of, bind


def look_at_places(config: Config, *, otherwise: Level) -> Iterator[Finding]:
    """Find addresses and ports that this machine has not to give, a run folder nobody can write to, and a transport without its devices.

    `otherwise` is the level of what may be right on another machine.
    """
    for attempt in _listening(config):
        try:
            attempt()
        except ConfigError as error:
            yield Finding(otherwise, "", str(error))
    folder = doctor.existing(config.run.folder)
    if not folder.is_dir():
        yield Finding(Level.FAIL, "run.folder", f"{config.run.folder}: {folder} is a file", "name a folder, with run.folder=...")
    elif not os.access(folder, os.W_OK | os.X_OK):
        found = f"{config.run.folder}: this user may not write to {folder}"
        yield Finding(otherwise, "run.folder", found, "name a folder that you may write to, with run.folder=...")
    if config.weights.transport in ("nccl", "cuda_ipc") and not has_gpu():
        found = f"{config.weights.transport} takes policies from GPU to GPU, and this machine has none"
        yield Finding(otherwise, "weights.transport", found, 'leave it out ("auto" takes what the devices can do)')


def _listening(config: Config) -> Iterator[Callable[[], None]]:
    """Yield one attempt for each socket that settings place somewhere."""
    yield lambda: bind(address_of(config.run.interface), 0, keys="run.").close()
    if (gateway := config.gateway) is not None:
        yield lambda: bind(gateway.interface, gateway.port, keys="gateway.").close()
    if (tinker := config.tinker) is not None:
        yield lambda: bind(tinker.interface, tinker.port, keys="tinker.").close()
    if "prometheus" in config.tracking.to:
        tracking = config.tracking
        yield lambda: bind(tracking.prometheus_interface, tracking.prometheus_port, keys="tracking.prometheus_").close()
