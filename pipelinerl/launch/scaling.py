"""Asks a live run for other numbers of engines or of trainer ranks, and follows what becomes of the request (`pipelinerl scale`)."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.config.file import load_run, with_ranks, with_tensor_parallel
from pipelinerl.config.scaling import why_fixed, why_trainer_fixed, why_width_fixed
from pipelinerl.errors import ConfigError, PeerRefused, PeerSilent
from pipelinerl.launch.run_folder import SCRIPT_FILE, is_finished
from pipelinerl.runtime.membership import MAX_DRAIN_S, Members, ScaleFolder, ScaleRequest, StartedBy, reward_kind
from pipelinerl.transport.endpoint import is_listening, read_endpoint

ANSWER_S = 30.0
"""Longest wait for an orchestrator to answer. It looks twice a second; only one that is gone, or stands still, takes as long."""
LOOK_EVERY_S = 0.1
"""Seconds between two looks for its answer, which is a file."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a run is asked for. None: what it has."""

    engines: int | None = None
    prm: int | None = None
    """Engines of the process reward model."""
    rewards: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Processes of reward models by the keys of their sections, such as `reward.1`; `reward` is the only one."""
    trainer: int | None = None
    """Ranks."""
    tensor_parallel_size: int | None = None
    """Of engines."""

    def __str__(self) -> str:
        others = {"trainer": self.trainer, "tensor_parallel_size": self.tensor_parallel_size}
        counts = {"engines": self.engines, "prm": self.prm, **self.rewards, **others}
        return " ".join(f"{name}={count}" for name, count in counts.items() if count is not None)


def wanted_of(words: Sequence[str]) -> Wanted:
    """Return what `engines=N`, `prm=N`, `reward=N`, `reward.1=N`, `trainer=N` and `tensor_parallel_size=N` say. Raises `ConfigError`."""
    found = [re.fullmatch(r"(engines|prm|trainer|tensor_parallel_size|reward(?:\.\d{1,6})?)=(\d{1,6})", word) for word in words]
    counts = {one[1]: int(one[2]) for one in found if one is not None}
    if not counts or len(counts) < len(words):
        raise ConfigError(
            f"{' '.join(words)}: expected engines=N, the number of engines that the run is to have, such as engines=4, prm=N, the engines"
            " of its process reward model, reward=N, the processes of its reward model (of several reward.1=N, by the place of its section,"
            " from 0), trainer=N, the ranks of its trainer, tensor_parallel_size=N, the ranks of each engine, or several of these"
        )
    rewards = {name: counts.pop(name) for name in list(counts) if name.startswith("reward")}
    return Wanted(rewards=rewards, **counts)


def ask(run_folder: Path, wanted: Wanted, *, drain_s: float, started_by: StartedBy) -> Members:
    """Ask for a number of engines, of either kind, or of trainer ranks, and return the run's engines, as its orchestrator has answered.

    Raises `ConfigError` for what cannot be asked of this run, `PeerRefused` with the orchestrator's words, and `PeerSilent` without any.
    """
    wanted = check(run_folder, wanted, drain_s=drain_s, started_by=started_by)
    folder = ScaleFolder(run_folder)
    newest = 0 if (found := folder.members()) is None else found.request_id
    number = max(time.time_ns(), newest + 1)  # the clock of whoever asked last may be ahead of this one
    request = ScaleRequest(request_id=number, drain_s=drain_s, started_by=started_by, **dataclasses.asdict(wanted))
    folder.ask(request)
    end = time.monotonic() + ANSWER_S
    while (found := folder.members()) is None or found.request_id < number:
        if time.monotonic() > end:
            folder.withdraw(request)
            raise PeerSilent(
                f"waited {ANSWER_S:g} s for the orchestrator of {run_folder} to answer {wanted}, which is asked for no more; see"
                " logs/orchestrator.log there"
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


def check(run_folder: Path, wanted: Wanted, *, drain_s: float, started_by: StartedBy) -> Wanted:
    """Refuse what cannot be asked of this run, and return it with reward models by the keys of their sections. Raises `ConfigError`."""
    check_is_run(run_folder)
    config = load_run(run_folder)
    if config.policies or (run_folder.parent.parent / "config.json").is_file():
        raise ConfigError(f"{run_folder} is a run of several policies, which keep the engines that they began with")
    if (why := why_fixed(config.pipeline, config.weights, config.tinker)) is not None:
        raise ConfigError(f"{run_folder} keeps its {config.engine.count} engines: {why}")
    if wanted.trainer is not None:
        _check_trainer(config, run_folder, wanted.trainer)
    if wanted.engines is not None and not 1 <= wanted.engines <= config.engine.most:
        raise ConfigError(
            f"engines={wanted.engines}: expected 1 to {config.engine.most}, the most that this run may have. A run needs one at least; more"
            f" than {config.engine.most} need engine.max_count, with which it is started or resumed"
        )
    if wanted.tensor_parallel_size is not None:
        _check_width(config, run_folder, wanted)
    if wanted.prm is not None:
        _check_prm(config, run_folder, wanted.prm, started_by=started_by)
    if wanted.rewards:
        _check_is_on_one_machine(" ".join(f"{name}={count}" for name, count in wanted.rewards.items()), run_folder, started_by=started_by)
        wanted = dataclasses.replace(wanted, rewards=_rewards_of(config, run_folder, wanted.rewards))
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
    return wanted


def _rewards_of(config: Config, run_folder: Path, wanted: Mapping[str, int]) -> dict[str, int]:
    """Return the processes of reward models that are asked for by the keys of their sections, where the run's models can have them. Its
    orchestrator looks at the same once more."""
    keys = {reward_kind(index): reward for index, reward in enumerate(config.reward)}
    models = {kind: reward for kind, reward in keys.items() if reward.model is not None}
    there = ", ".join(f"{kind} ({reward.reference})" for kind, reward in models.items())
    found: dict[str, int] = {}
    for name, count in wanted.items():
        if not models:
            raise ConfigError(f"{name}={count}: {run_folder} has no reward model: no [[reward]] section has a model")
        if name == "reward" and len(models) > 1:
            raise ConfigError(f"{name}={count}: {run_folder} has several reward models: {there}. Say which: {next(iter(models))}={count}")
        kind = next(iter(models)) if name == "reward" else name
        if kind not in models:
            what = f"the function {keys[kind].reference}" if kind in keys else "no section of [[reward]]"
            raise ConfigError(f"{name}={count}: {kind} of {run_folder} is {what}. Its reward models are {there}")
        if kind in found:
            raise ConfigError(f"{name}={count}: {kind} is asked for twice. Leave one of them out")
        most = models[kind].most
        if not 1 <= count <= most:
            raise ConfigError(
                f"{name}={count}: expected 1 to {most}, the most that this run may have. The run needs one; more than {most} need a larger"
                f" {kind}.concurrency, with which it is started or resumed"
            )
        found[kind] = count
    return found


def _check_prm(config: Config, run_folder: Path, count: int, *, started_by: StartedBy) -> None:
    """Refuse engines that the run's process reward model cannot have. Its orchestrator looks at the same once more."""
    if not config.prm.is_used:
        raise ConfigError(f"prm={count}: {run_folder} has no process reward model: neither prm.path nor prm.judge.url is set")
    _check_is_on_one_machine(f"prm={count}", run_folder, started_by=started_by)
    if not 1 <= count <= config.prm.most:
        raise ConfigError(
            f"prm={count}: expected 1 to {config.prm.most}, the most that this run may have. The run needs one; more than {config.prm.most}"
            " need a larger prm.count, with which it is started or resumed"
        )


def _check_width(config: Config, run_folder: Path, wanted: Wanted) -> None:
    """Refuse ranks that engines of this run cannot have. Its orchestrator looks at the same once more, and at how policies travel."""
    size = wanted.tensor_parallel_size or 0
    if size < 1:
        raise ConfigError(f"tensor_parallel_size={size}: expected 1 or more, the ranks of each engine that share every matrix")
    if wanted.prm is not None or wanted.rewards or wanted.trainer is not None:
        raise ConfigError(f"tensor_parallel_size={size}: ask for prm=, reward= and trainer= before or after it, in a call of their own")
    found = ScaleFolder(run_folder).members()
    if found is not None and found.tensor_parallel_size == size:
        return
    if (why := why_width_fixed(config.engine, config.pipeline, size)) is not None:
        raise ConfigError(f"tensor_parallel_size={size}: {why}")
    with_tensor_parallel(config, size)


def _check_is_on_one_machine(asked: str, run_folder: Path, *, started_by: StartedBy) -> None:
    """Refuse processes of models that score in a run over several machines."""
    if (run_folder / "roles.json").exists() or started_by is StartedBy.JOB:
        raise ConfigError(
            f"{asked}: models that score have their processes on the machine of the run's own launcher alone: not with --elsewhere, and not"
            " where processes are dealt to the nodes of a job (Slurm, Kubernetes, Ray). Submit it with prm.count, or reward.concurrency"
        )


def _check_trainer(config: Config, run_folder: Path, ranks: int) -> None:
    """Refuse ranks that the run's trainer cannot have. Its orchestrator looks at the same once more."""
    if (run_folder / "roles.json").exists():
        raise ConfigError(
            f"trainer={ranks}: {run_folder} has its processes dealt to the nodes of a job (Slurm, Kubernetes, Ray), where the trainer keeps"
            " the ranks that the job began with. Submit it again with another trainer.ranks: it goes on from its checkpoint"
        )
    if (run_folder / SCRIPT_FILE).exists():
        raise ConfigError(f"trainer={ranks}: {run_folder} is a script's, whose trainer keeps the ranks that it began with")
    if (why := why_trainer_fixed(config.pipeline, config.weights, config.tinker, config.lora)) is not None:
        raise ConfigError(f"{run_folder} keeps its {config.trainer.ranks} ranks of the trainer: {why}")
    if not 1 <= ranks <= config.trainer.most_ranks:
        raise ConfigError(
            f"trainer={ranks}: expected 1 to {config.trainer.most_ranks}, the most that this run may have. More need trainer.max_ranks,"
            " with which it is started or resumed"
        )
    with_ranks(config, ranks)
