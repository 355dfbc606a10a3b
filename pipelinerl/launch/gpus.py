"""Which process takes which GPU of a machine: every rank of an engine, every reward model and every rank of the trainer one of its own.

Without a word in the settings engines take the first ones, then the process reward model, then reward models (`[[reward]] model`), then the
trainer's ranks: the ranks of one engine are neighbours. Where engines and trainer take turns (`pipeline.placement = "colocated"`), the
trainer's ranks have the engines' GPUs, from the first on; engines apart (`engine.apart`) follow after these. A list (`engine.gpus`,
`prm.gpus`, `trainer.gpus`) is dealt in its order, on every machine of a run alike; what it names is left out of what the others are
dealt. Each process is told its own GPUs on its command line, as UUIDs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from pipelinerl.config import Config
from pipelinerl.errors import ConfigError
from pipelinerl.launch.roles import Role
from pipelinerl.rewards.calls import component_names
from pipelinerl.runtime.devices import Gpu, named, said
from pipelinerl.runtime.membership import Kind, reward_kind
from pipelinerl.runtime.parts import engines_of, share_of

ENGINES, REWARDS, TRAINER = "engines", "scorer-0", "trainer"
"""The processes that compute on GPUs, by their names without the number of the machine; the process reward model's are of a kind."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The GPUs of one machine, dealt."""

    gpus: tuple[Gpu, ...]
    taken: Mapping[str, tuple[Gpu, ...]]
    """By `engine-3`, `prm-1`, `reward-orm-0` and `trainer`; the trainer's are in the order of its ranks here."""
    first_rank: int = 0
    """The first of the trainer's ranks on this machine."""

    def table(self) -> Iterator[str]:
        """A line for each GPU, with who takes it."""
        return (f"{gpu}: {users}" for gpu, users in self.users())

    def users(self) -> Iterator[tuple[Gpu, str]]:
        """Each GPU, and the processes that compute on it."""
        for gpu in self.gpus:
            users = [self._user(who, gpu, taken) for who, taken in self.taken.items() if gpu in taken]
            yield gpu, ", ".join(users) or "free"

    def _user(self, who: str, gpu: Gpu, taken: Sequence[Gpu]) -> str:
        if who == TRAINER:
            return f"trainer rank {self.first_rank + taken.index(gpu)}"
        return who if len(taken) == 1 else f"{who} rank {taken.index(gpu)}"


def place(config: Config, roles: Sequence[Role], gpus: Sequence[Gpu], *, is_alone: bool = True) -> tuple[tuple[Role, ...], Placement]:
    """Deal the GPUs of one machine to the processes on it, and tell each on its command line; on a machine without any, nobody is told.

    `is_alone`: the run has no other machine. Raises `ConfigError` with what was found, where it is too little or not what settings name.
    """
    by_kind = {
        kind: role for role in roles for kind in (ENGINES, REWARDS, TRAINER) if role.name == kind or role.name.startswith(f"{kind}-")
    }
    ranks = share_of(_part(by_kind.get(TRAINER)), count=config.trainer.ranks) if TRAINER in by_kind else range(0)
    engine_ids = _engines_in(config, by_kind.get(ENGINES))
    prms = {f"prm-{role.engine_ids[0]}": role.name for role in roles if role.kind == Kind.PRM and config.prm.path is not None}
    wanted: dict[str, dict[str, int]] = {
        "engine": {f"engine-{number}": config.engine.num_ranks for number in engine_ids} if config.engine.kind == "vllm" else {},
        "prm": dict.fromkeys(prms, config.prm.num_ranks),
        "reward": dict.fromkeys(_reward_models(config), 1) if REWARDS in by_kind else {},
        "trainer": {TRAINER: len(ranks)} if ranks else {},
    }
    if not gpus:
        _refuse_names(config, [part for part, users in wanted.items() if users])
        return tuple(roles), Placement(gpus=(), taken={})
    if config.is_colocated and wanted["engine"] and config.engine.kv_cache_bytes is None:
        raise ConfigError(
            'pipeline.placement is "colocated", and without engine.kv_cache_bytes an engine takes all that its GPU has free when it starts,'
            " and leaves the trainer, which starts beside it, nothing. Set engine.kv_cache_bytes"
        )
    taken = _deal(config, wanted, gpus, is_alone=is_alone)
    given = {
        ENGINES: [taken[f"engine-{number}"] for number in engine_ids if f"engine-{number}" in taken],
        REWARDS: [taken[who] for who in wanted["reward"]],
        TRAINER: [taken[TRAINER]] if TRAINER in taken else [],
    }
    told = {by_kind[kind].name: _arguments(groups) for kind, groups in given.items() if kind in by_kind}
    told |= {name: _arguments([taken[who]]) for who, name in prms.items()}
    placed = tuple(dataclasses.replace(role, command=(*role.command, *told.get(role.name, ()))) for role in roles)
    return placed, Placement(gpus=tuple(gpus), taken=taken, first_rank=ranks.start)


def place_joined(
    config: Config,
    role: Role,
    others: Iterable[Role],
    gpus: Sequence[Gpu],
    *,
    gone: Collection[tuple[str, int]] = (),
    dealt: Collection[str] = (),
) -> Role:
    """Deal engines that join a live run what its other processes on this machine leave; engines that are `gone` leave what they had.
    `dealt` are UUIDs that processes of reward models have which have joined.

    Raises `ConfigError` where it is too little.
    """
    if role.kind == Kind.PRM and config.prm.path is None:
        return role
    free = _free(config, others, gpus, gone=gone, dealt=dealt)
    if gpus and not free and not config.engine.shares_gpus:
        do = "Have an engine leave in the same call: engines=N" if role.kind == Kind.PRM else "Have another machine start them: --elsewhere"
        raise ConfigError(f"every GPU of this machine is taken by the run: {said(gpus)}. {do}")
    sections = {"engine": config.engine, "prm": config.prm}
    own = config.model_copy(update={name: section.model_copy(update={"gpus": ()}) for name, section in sections.items()})
    (placed,), _ = place(own, (role,), free or gpus, is_alone=False)
    return placed


def place_reward_process(
    config: Config,
    others: Iterable[Role],
    gpus: Sequence[Gpu],
    *,
    gone: Collection[tuple[str, int]] = (),
    dealt: Collection[str] = (),
) -> str:
    """Return the UUID of the GPU for a process of a reward model that joins; empty on a machine without any. See `place_joined`.

    Raises `ConfigError` where none is free.
    """
    free = _free(config, others, gpus, gone=gone, dealt=dealt)
    if gpus and not free and not config.engine.shares_gpus:
        raise ConfigError(f"every GPU of this machine is taken by the run: {said(gpus)}. Have an engine leave in the same call: engines=N")
    return next((gpu.uuid for gpu in (*free, *gpus)), "")


def place_trainer(
    config: Config,
    role: Role,
    others: Iterable[Role],
    gpus: Sequence[Gpu],
    *,
    ranks: int,
    gone: Collection[tuple[str, int]] = (),
    dealt: Collection[str] = (),
) -> Role:
    """Deal a live run's trainer of so many ranks what the run's other processes on this machine leave, first what `trainer.gpus` names.

    Raises `ConfigError` where it is too little.
    """
    free = _free(config, others, gpus, gone=gone, dealt=dealt)
    if gpus and len(free) < ranks and not config.engine.shares_gpus:
        raise ConfigError(
            f"a trainer of {ranks} ranks needs as many GPUs of this machine, and the run's other processes leave {len(free)} of"
            f" {len(gpus)}: {said(free) or 'none'}. Have engines leave in the same call: engines=N"
        )
    first = (
        {gpu.uuid for gpu in named(config.trainer.gpus, gpus, key="trainer.gpus", is_alone=False)} if config.trainer.gpus else set[str]()
    )
    ordered = sorted(free or gpus, key=lambda gpu: gpu.uuid not in first)
    own = config.model_copy(update={"trainer": config.trainer.model_copy(update={"gpus": (), "ranks": ranks})})
    (placed,), _ = place(own, (role,), ordered, is_alone=False)
    return placed


def _free(
    config: Config, others: Iterable[Role], gpus: Sequence[Gpu], *, gone: Collection[tuple[str, int]], dealt: Collection[str]
) -> list[Gpu]:
    """The GPUs that no process has. Each engine's are an option of its process, in the order of its engines, and those of reward models
    are options of the scorer."""
    taken = set(dealt)
    for other in others:
        groups = [value for option, value in itertools.pairwise(other.command) if option == "--gpus"]
        is_scorer = other.name == REWARDS
        owners = list(_reward_processes(config)) if is_scorer else [(str(other.kind), engine_id) for engine_id in other.engine_ids]
        left = [len(owners) == len(groups) and owner in gone for owner in owners] or [False] * len(groups)
        taken |= {uuid for group, is_free in zip(groups, left, strict=False) if not is_free for uuid in group.split(",")}
    return [gpu for gpu in gpus if gpu.uuid not in taken]


def _deal(config: Config, wanted: Mapping[str, Mapping[str, int]], gpus: Sequence[Gpu], *, is_alone: bool) -> dict[str, tuple[Gpu, ...]]:
    lists = {
        part: named(names, gpus, key=f"{part}.gpus", is_alone=is_alone) for part, names in _names(config).items() if names and wanted[part]
    }
    if config.is_colocated and "trainer" in lists and wanted["engine"]:
        lists.setdefault("engine", _beside_trainer(config, wanted["engine"], lists, gpus))
    listed = {gpu.uuid for pool in lists.values() for gpu in pool}
    rest = [gpu for gpu in gpus if gpu.uuid not in listed]
    next_of_rest, taken = 0, {}
    num_trained_on = sum(wanted["trainer"].values()) if config.is_mixed and "trainer" not in lists else 0
    for part, users in wanted.items():
        pool, first = (lists[part], 0) if part in lists else (rest, next_of_rest)
        if part == "trainer" and part not in lists and config.is_colocated:
            pool, first = lists.get("engine", rest), 0
        for who, count in users.items():
            if part == "engine" and part not in lists and not _takes_turns(config, who):
                first = max(first, num_trained_on)
            if first + count > len(pool) and config.engine.shares_gpus:
                pool = pool if part in lists else list(gpus)
                first = 0
            if first + count > len(pool):
                raise ConfigError(_too_few(wanted, part, pool, gpus, is_listed=part in lists))
            taken[who] = tuple(pool[first : first + count])
            first += count
        if part not in lists:
            next_of_rest = first
    _refuse_overlaps(config, taken)
    return taken


def _beside_trainer(config: Config, engines: Mapping[str, int], lists: Mapping[str, Sequence[Gpu]], gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs of engines, in their order, where those of the trainer are named: theirs, and for engines apart what nobody names."""
    in_turns = sum(count for who, count in engines.items() if _takes_turns(config, who))
    listed = {gpu.uuid for pool in lists.values() for gpu in pool}
    unnamed = [gpu for gpu in gpus if gpu.uuid not in listed]
    return [*lists["trainer"][:in_turns], *unnamed[: sum(engines.values()) - in_turns]]


def _takes_turns(config: Config, who: str) -> bool:
    return who.startswith("engine-") and config.takes_turns(int(who.removeprefix("engine-")))


def _too_few(wanted: Mapping[str, Mapping[str, int]], part: str, pool: Sequence[Gpu], gpus: Sequence[Gpu], *, is_listed: bool) -> str:
    parts = {name: sum(users.values()) for name, users in wanted.items() if users}
    do = (
        "Lower engine.count or trainer.ranks, or have them share GPUs: engine.shares_gpus = true, with an engine.kv_cache_bytes that leaves"
        " the others their room"
    )
    if is_listed:
        return f"{part}.gpus names {len(pool)} GPUs here, and {parts[part]} are needed: one for each rank. Name more. {do}"
    need = " and ".join(f"{name} {count}" for name, count in parts.items())
    found = f"of {len(gpus)} found {len(pool)} are not named for others: {said(gpus)}"
    return f"{need} GPUs are needed on this machine, one for each rank, and {found}. {do}"


def _refuse_overlaps(config: Config, taken: Mapping[str, tuple[Gpu, ...]]) -> None:
    users: dict[str, str] = {}
    for who, gpus in taken.items():
        for gpu in gpus:
            other = users.setdefault(gpu.uuid, who)
            in_turns = who == TRAINER and _takes_turns(config, other)
            if other != who and not config.engine.shares_gpus and not in_turns:
                raise ConfigError(
                    f"{other} and {who} are both given GPU {gpu}: each would take its memory for itself. Name others in engine.gpus,"
                    " prm.gpus or trainer.gpus, or say that they share: engine.shares_gpus = true, with engine.kv_cache_bytes"
                )


def _refuse_names(config: Config, parts: Sequence[str]) -> None:
    for part in parts:
        if names := _names(config)[part]:
            raise ConfigError(
                f"{part}.gpus names {', '.join(map(str, names))}, and no GPU was found that this run could use: NVIDIA's driver tells of"
                " none, CUDA_VISIBLE_DEVICES hides them, or torch is a build for CPUs (`pipelinerl doctor` says which)"
            )


def _names(config: Config) -> dict[str, tuple[int | str, ...]]:
    return {"engine": config.engine.gpus, "prm": config.prm.gpus, "reward": (), "trainer": config.trainer.gpus}


def _reward_models(config: Config) -> Iterator[str]:
    """Yield a name for each process of each reward model, in the order in which a scorer takes their GPUs."""
    names = component_names([reward.reference for reward in config.reward])
    kinds = {reward_kind(index): name for index, name in enumerate(names)}
    return (f"reward-{kinds[kind]}-{number}" for kind, number in _reward_processes(config))


def _reward_processes(config: Config) -> Iterator[tuple[str, int]]:
    """Yield the kind and the number of each process of a reward model that the run begins with, in the same order."""
    for index, reward in enumerate(config.reward):
        if reward.model is not None:
            yield from ((reward_kind(index), number) for number in range(reward.concurrency or 1))


def _arguments(groups: Sequence[Sequence[Gpu]]) -> tuple[str, ...]:
    return tuple(word for group in groups for word in ("--gpus", ",".join(gpu.uuid for gpu in group)))


def _engines_in(config: Config, role: Role | None) -> Sequence[int]:
    """The engines of a role's process."""
    if role is None:
        return range(0)
    engine = config.engine
    ids = _part(role, "--ids")
    return engines_of(_part(role), _part(role, "--elsewhere"), num_here=engine.num_here, num_elsewhere=engine.elsewhere, ids=ids)


def _part(role: Role | None, option: str = "--part") -> str | None:
    """The K/N that a role was told; None where it is the only one of its kind."""
    if role is None or option not in role.command:
        return None
    return role.command[role.command.index(option) + 1]
