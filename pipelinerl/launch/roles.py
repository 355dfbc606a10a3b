"""The processes of a run as command lines: the same run starts locally, under a batch system, or by hand."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.config.scaling import why_trainer_fixed
from pipelinerl.observe.tracking.beside import trackers
from pipelinerl.runtime.early import EarlyProcesses
from pipelinerl.runtime.membership import FIRST_PRM, Kind, Member, StartedBy
from pipelinerl.runtime.parts import engines_of, share_of
from pipelinerl.runtime.sidecars import Sidecar
from pipelinerl.upload import uploader

TRAINER = "trainer"
"""The name of the trainer's process, where one machine has all of its ranks."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One process of a run."""

    name: str
    command: tuple[str, ...]
    has_nothing_to_save: bool = False
    """When the orchestrator has ended, it may be ended, too: it may be one that started too late to be told."""
    is_spare: bool = False
    """It is an engine that has joined since the run began: the run goes on without it."""
    begins_early: bool = False
    """It imports for longest, and may begin with that before the run folder is there (`pipelinerl.runtime.early`)."""

    engine_ids: tuple[int, ...] = ()
    """Of a process of engines: theirs."""
    request_ids: tuple[int, ...] = ()
    """The requests that brought these engines; empty: the run began with them."""
    kind: Kind = Kind.ENGINES
    """Of a process of engines: what they do."""

    @property
    def requests(self) -> dict[int, int]:
        """The request that brought each engine, by the engine's number; 0 where the run began with it."""
        return dict(zip(self.engine_ids, self.request_ids or (0,) * len(self.engine_ids), strict=True))

    @property
    def program(self) -> str:
        """The name by which Python runs it."""
        return self.command[2]

    def __str__(self) -> str:
        return f"{self.name:<13} {shlex.join(self.command)}"


def roles_of(config: Config, run_folder: Path, *, trainer_nodes: int = 1, engine_nodes: int = 1) -> tuple[Role, ...]:
    """The processes of a run, as command lines; the orchestrator first. Over several nodes, engines and trainer are one process on each."""
    python, run = sys.executable, ("--run-folder", str(run_folder))
    is_served = config.tinker is not None
    return (
        Role(name="orchestrator", command=(python, "-m", "orchestrator.serving" if is_served else "orchestrator", *run)),
        *(
            Role(
                name=name,
                command=(python, "-m", "pipelinerl.engine", *run, *part),
                has_nothing_to_save=True,
                begins_early=config.engine.kind == "vllm",
                engine_ids=tuple(share_of(part[-1] if part else None, count=config.engine.num_here)),
            )
            for name, part in (_parts("engines", engine_nodes) if config.engine.num_here else [])
        ),
        *([] if is_served else [_scorer_role(run)]),
        *(
            [prm_engine(run_folder, FIRST_PRM + number, started_by=StartedBy.RUN) for number in range(config.prm.count)]
            if config.prm.is_used
            else []
        ),
        *([Role(name="gateway-0", command=(python, "-m", "pipelinerl.gateway", *run), has_nothing_to_save=True)] if config.gateway else []),
        *(
            Role(name=name, command=(python, "-m", program, *run, *part), begins_early=program == "trainer")
            for name, part in _parts(TRAINER, trainer_nodes)
            for program in [_trainer(config, part)]
        ),
    )


def trainer_of(config: Config, run_folder: Path) -> Role:
    """The trainer of a live run with other ranks than it began with: they are named, since the run's settings are not written anew."""
    command = (sys.executable, "-m", _trainer(config, ()), "--run-folder", str(run_folder), "--ranks", str(config.trainer.ranks))
    return Role(name=TRAINER, command=command)


def processes_beside_script(config: Config, run_folder: Path) -> tuple[Role, ...]:
    """The processes of a script's run: the script itself is the orchestrator."""
    return tuple(role for role in roles_of(config, run_folder) if role.name != "orchestrator")


def engine_roles(config: Config, run_folder: Path) -> tuple[Role, ...]:
    """The processes of a policy that nothing trains."""
    return tuple(role for role in roles_of(config, run_folder) if role.program == "pipelinerl.engine")


def engines_elsewhere(config: Config, run_folder: Path, part: str) -> Role:
    """The engines of a run that another job starts: part `K/N` of those that the run leaves to others."""
    command = (sys.executable, "-m", "pipelinerl.engine", "--run-folder", str(run_folder), "--elsewhere", part)
    engine_ids = engines_of(None, part, num_here=config.engine.num_here, num_elsewhere=config.engine.elsewhere)
    name = f"engines-elsewhere-{part.partition('/')[0]}"
    return Role(name=name, command=command, has_nothing_to_save=True, engine_ids=tuple(engine_ids))


def joined_engines(run_folder: Path, members: Sequence[Member]) -> Role:
    """Engines that join a live run, all with one `tensor_parallel_size`, or the settings', and all started by the same."""
    engine_ids, request_ids = tuple(one.engine_id for one in members), tuple(one.request_id for one in members)
    ids = ("--ids", ",".join(map(str, engine_ids)), "--request-ids", ",".join(map(str, request_ids)))
    size = () if members[0].tensor_parallel_size is None else ("--tensor-parallel-size", str(members[0].tensor_parallel_size))
    run = ("--run-folder", str(run_folder), *ids, "--started-by", members[0].started_by, *size)
    return Role(
        name=f"engines-joined-{engine_ids[0]}",
        command=(sys.executable, "-m", "pipelinerl.engine", *run),
        has_nothing_to_save=True,
        is_spare=True,
        engine_ids=engine_ids,
        request_ids=request_ids,
    )


def prm_engine(run_folder: Path, number: int, *, started_by: StartedBy, request_id: int = 0) -> Role:
    """An engine of the process reward model: one that the run begins with, or that joins it."""
    joined = ("--request-id", str(request_id)) if request_id else ()
    run = ("--run-folder", str(run_folder), "--index", str(number), "--started-by", started_by, *joined)
    return Role(
        name=f"scorer-{number}",
        command=(sys.executable, "-m", "pipelinerl.rewards.prm.process", *run),
        has_nothing_to_save=True,
        is_spare=started_by is not StartedBy.RUN,
        engine_ids=(number,),
        request_ids=(request_id,),
        kind=Kind.PRM,
    )


def sidecars_of(config: Config, run_folder: Path) -> tuple[Sidecar, ...]:
    """The processes beside a run, which it does not depend on."""
    to, keep = config.checkpoint.to, config.checkpoint.keep
    return (*trackers(run_folder, config.tracking.to), *([] if to is None else [uploader(run_folder, to, keep=keep)]))


def _scorer_role(run: tuple[str, str]) -> Role:
    command = (sys.executable, "-m", "pipelinerl.rewards", *run, "--index", "0")
    return Role(name="scorer-0", command=command, has_nothing_to_save=True)


def begin_early(config: Config, *, roles: Callable[[Config, Path], Iterable[Role]] = roles_of) -> EarlyProcesses:
    """Start those processes of a run that import for longest: they need not wait for what is looked at before it. A context."""
    early = EarlyProcesses()
    for role in roles(config, config.run.folder):
        if role.begins_early:
            early.start(role.program, settings=config.model_dump_json())
    return early


def _parts(role: str, num_nodes: int) -> list[tuple[str, tuple[str, ...]]]:
    """(name, what tells it which part is its own) of the role's process on each node."""
    return [(role, ())] if num_nodes == 1 else [(f"{role}-{node}", ("--part", f"{node}/{num_nodes}")) for node in range(num_nodes)]


def _trainer(config: Config, part: tuple[str, ...]) -> str:
    """One rank meets nobody; several are started, and ended, by a parent of their own."""
    return "trainer" if config.trainer.ranks == 1 and not part else "trainer.parallel.rendezvous"


def peers_of(config: Config) -> tuple[str, ...]:
    """The names of the orchestrator's peers."""
    num_scorers = 0 if config.tinker is not None else FIRST_PRM + (config.prm.most if config.prm.is_used else 0)
    counts = {"engine": config.engine.most, "scorer": num_scorers, "trainer": _most_replicas(config)}
    counts["gateway"] = int(config.gateway is not None)
    return tuple(f"{role}-{number}" for role, count in counts.items() for number in range(count))


def _most_replicas(config: Config) -> int:
    """Replicas that the trainer may come to have; one where settings keep its ranks has those that it begins with."""
    trainer = config.trainer
    is_fixed = why_trainer_fixed(config.pipeline, config.weights, config.tinker, config.lora) is not None
    return trainer.layout.replicas if is_fixed else max(trainer.layout.replicas, trainer.most_ranks // trainer.layout.ranks_per_replica)
