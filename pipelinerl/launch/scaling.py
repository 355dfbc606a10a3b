"""Asks a live run for another number of engines, and follows what becomes of the request (`pipelinerl scale`)."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.config.file import load_run
from pipelinerl.config.scaling import why_fixed
from pipelinerl.errors import ConfigError, PeerRefused, PeerSilent
from pipelinerl.launch.run_folder import is_finished
from pipelinerl.runtime.membership import MAX_DRAIN_S, Members, ScaleFolder, ScaleRequest, StartedBy
from pipelinerl.transport.endpoint import is_listening, read_endpoint

ANSWER_S = 30.0
"""Longest wait for an orchestrator to answer. It looks twice a second; only one that is gone, or stands still, takes as long."""
LOOK_EVERY_S = 0.1
"""Seconds between two looks for its answer, which is a file."""


def wanted_of(words: Sequence[str]) -> int:
    """Return N of `engines=N`. Raises `ConfigError`."""
    found = re.fullmatch(r"engines=(\d{1,6})", words[0]) if len(words) == 1 else None
    if found is None:
        raise ConfigError(f"{' '.join(words)}: expected engines=N, the number of engines that the run is to have, such as engines=4")
    return int(found[1])


def ask(run_folder: Path, *, engines: int, drain_s: float, started_by: StartedBy) -> Members:
    """Ask for a number of engines and return the run's engines, as its orchestrator has answered.

    Raises `ConfigError` for what cannot be asked of this run, `PeerRefused` with the orchestrator's words, and `PeerSilent` without any.
    """
    check(run_folder, engines=engines, drain_s=drain_s, started_by=started_by)
    folder, number = ScaleFolder(run_folder), time.time_ns()
    folder.ask(ScaleRequest(request_id=number, engines=engines, drain_s=drain_s, started_by=started_by))
    end = time.monotonic() + ANSWER_S
    while (found := folder.members()) is None or found.request_id < number:
        if time.monotonic() > end:
            raise PeerSilent(
                f"waited {ANSWER_S:g} s for the orchestrator of {run_folder} to answer engines={engines}; see logs/orchestrator.log there"
            )
        time.sleep(LOOK_EVERY_S)
    if found.request_id == number and found.refused:
        raise PeerRefused(found.refused)
    return found


def check_is_run(run_folder: Path) -> None:
    """Raise `ConfigError` where no run is."""
    if not (run_folder / "config.json").is_file():
        raise ConfigError(f"{run_folder} is no run's folder: it has no config.json" if run_folder.is_dir() else f"no run at {run_folder}")


def is_live(run_folder: Path) -> bool:
    """Return whether an orchestrator of a run listens."""
    return is_listening(run_folder / "endpoints" / "engine.json")


def check(run_folder: Path, *, engines: int, drain_s: float, started_by: StartedBy) -> None:
    """Refuse what cannot be asked of this run. Raises `ConfigError`."""
    check_is_run(run_folder)
    config = load_run(run_folder)
    if config.policies or (run_folder.parent.parent / "config.json").is_file():
        raise ConfigError(f"{run_folder} is a run of several policies, which keep the engines that they began with")
    if (why := why_fixed(config.pipeline, config.weights, config.tinker)) is not None:
        raise ConfigError(f"{run_folder} keeps its {config.engine.count} engines: {why}")
    if not 1 <= engines <= config.engine.most:
        raise ConfigError(
            f"engines={engines}: expected 1 to {config.engine.most}, the most that this run may have. A run needs one at least; more than"
            f" {config.engine.most} need engine.max_count, with which it is started or resumed"
        )
    if not 0 <= drain_s <= MAX_DRAIN_S:
        raise ConfigError(f"--drain-s {drain_s:g}: expected 0 to {MAX_DRAIN_S:g} seconds")
    if is_finished(run_folder):
        raise ConfigError(f"{run_folder} is finished: it needs no engines")
    if not is_live(run_folder):
        raise ConfigError(f"{run_folder} is not live: no orchestrator listens. `pipelinerl run --resume` goes on with it")
    address = read_endpoint(run_folder / "endpoints" / "engine.json", deadline_s=0.0).address
    if started_by is StartedBy.JOB and address.startswith("tcp://127."):
        raise ConfigError(
            f"the orchestrator of {run_folder} listens on {address} alone, where no other machine reaches it. Start, or resume, the run"
            " with run.interface, the network that its machines share"
        )
