"""The engines that a live run has, as files in `<run>/scale` that everybody reads: they may join and leave while it goes on.

`request-<id>.json` is what somebody asks for (`pipelinerl scale`), `engines.json` what the orchestrator has made of it: the only one that
writes it. Whoever starts engines reads there which ones are its own, and leaves a word in `gone-<kind>-<engine>-<request>.json` when they
will not serve any more, and in `no-room-<engine>.json` when an engine of another width waits for GPUs. A number is given to another engine
once the one before has left; the request that brought an engine tells the two apart, wherever a process is meant.
Processes of reward models have no peer of their own: the scorer starts and ends them as it reads here, each that joins once the launcher
has dealt it a GPU (`reward-gpus.json`).
`trainer.json` says how many ranks the trainer has (`trainer_ranks`), and `trainer-failed.json` that those of a change do not start.
`elastic.json` is what the rule of elastic roles remembers (`elastic_roles`).
"""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from pipelinerl.errors import ConfigError
from pipelinerl.runtime.elastic_roles import RolesRecord
from pipelinerl.runtime.trainer_ranks import TrainerFailed, TrainerRanks

MAX_ENGINES = 1 << 16
"""Engines of a run. A larger value only lets a damaged file fill memory."""
MAX_DRAIN_S = 86400.0
"""Longest time that a leaving engine may be given."""


class Kind(enum.StrEnum):
    """What engines of a run do; the word by which a number of them is asked for."""

    ENGINES = "engines"
    """They write rollouts. Engine 2 is the peer `engine-2`."""
    PRM = "prm"
    """They score steps, as the process reward model. Engine 2 of it is the peer `scorer-2`; the first is `scorer-1`."""


FIRST_PRM = 1
"""The number of the process reward model's first engine: it comes after the scorer that runs reward functions."""


def reward_kind(index: int) -> str:
    """Return the kind of a reward model's processes: the key of its `[[reward]]` section, such as `reward.1`. Its processes run inside the
    scorer, and are numbered from 0."""
    return f"reward.{index}"


def is_reward(kind: str) -> bool:
    """Return whether members of a kind are processes of a reward model."""
    return kind.startswith("reward.")


class State(enum.StrEnum):
    """What an engine of a run is doing."""

    JOINING = "joining"
    """It was asked for, or its process was, and it has not announced itself."""
    LIVE = "live"
    """It has announced itself, and serves."""
    DRAINING = "draining"
    """It is to leave: it takes no new work, and ends what it has."""
    LEFT = "left"
    """It was asked to leave, and has."""
    LOST = "lost"
    """It ended, or fell silent, without having been asked to; the run goes on without it, and takes it back when it comes again."""


class StartedBy(enum.StrEnum):
    """Whoever starts an engine's process, and starts it again."""

    RUN = "run"
    """It was started with the run, on one of its nodes."""
    LAUNCHER = "launcher"
    """The run's launcher has started it since, on its own machine."""
    JOB = "job"
    """`pipelinerl engines` starts it: in another job, or on another machine."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of a run."""

    engine_id: Annotated[int, msgspec.Meta(ge=0, lt=MAX_ENGINES)]
    state: State
    started_by: StartedBy
    request_id: int = 0
    """The request that brought it; 0 of those that the run began with."""
    tensor_parallel_size: int | None = None
    """Its ranks that share every matrix (`engine.options.tensor_parallel_size`); None of the process reward model's."""
    reason: str = ""
    """Why it leaves, has left or is lost, for a person to read."""


class EnginesBefore(msgspec.Struct, frozen=True, kw_only=True):
    """What a run whose engines get another `tensor_parallel_size` had, and has again where none of the new ones comes to serve."""

    num_wanted: int
    tensor_parallel_size: int


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """The engines of a run at one moment, and the last request that they follow from."""

    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_ENGINES)]
    num_wanted: int
    """The number of engines that was asked for."""
    num_given_up: int = 0
    """Of these, lost ones that the run does without until they come again: no other engine takes their place."""
    count: int
    """`engine.count`, or `prm.count`, of the settings under which it was written: a run that goes on with another one begins anew."""
    tensor_parallel_size: int | None = None
    """That was asked for last: engines of another one leave as these come to serve. None of the process reward model's."""
    configured: int | None = None
    """`engine.options.tensor_parallel_size` of those settings: a run that goes on with another one begins anew, too."""
    before: EnginesBefore | None = None
    """None where no engine of another `tensor_parallel_size` is awaited."""
    drain_s: float = 60.0
    """What the request that asked for this one gives to engines which leave for it."""
    request_id: int = 0
    """The last request that was answered."""
    refused: str = ""
    """Why that request was refused; empty where it was carried out."""
    prm: Members | None = None
    """The engines of the process reward model; None in a run without one. They are in the same file, so that nobody sees one that joins
    before the one whose device it is to have leaves.
    """
    rewards: dict[str, Members] = {}
    """The processes of reward models, by their kinds."""

    def has_of_another_width(self, member: Member) -> bool:
        """Return whether engines of another `tensor_parallel_size` than this one's have devices that it may be waiting for."""
        there = [one for one in self.members if one.state in (State.JOINING, State.LIVE, State.DRAINING)]
        return any(one.tensor_parallel_size != member.tensor_parallel_size for one in there)

    def by_kind(self) -> dict[str, Members]:
        """Return the members of each kind that the run has."""
        prm = {} if self.prm is None else {str(Kind.PRM): self.prm}
        return {str(Kind.ENGINES): self, **prm, **self.rewards}

    def of(self, kind: str) -> Members | None:
        """Return the members of one kind; None in a run without any."""
        return self.by_kind().get(kind)


class ScaleRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The wish for a number of engines, of engines of the process reward model, of processes of reward models, of ranks of the trainer, or
    several of these."""

    request_id: int
    """Larger than that of every request before it."""
    engines: int | None = None
    """None: as many as there are."""
    prm: int | None = None
    """Engines of the process reward model; None: as many as there are."""
    rewards: dict[str, int] = {}
    """Processes of reward models by their kinds; of one that is not there: as many as there are."""
    trainer: int | None = None
    """Ranks of the trainer; None: as many as it has."""
    tensor_parallel_size: int | None = None
    """Of engines; None: that of now."""
    drain_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_DRAIN_S)] = 60.0
    """Seconds that engines which leave may take to end what they have; then it goes on in others."""
    started_by: StartedBy = StartedBy.LAUNCHER
    """Who is to start those that come."""

    def number_of(self, kind: str) -> int | None:
        """Return the number of one kind that is asked for; None: as many as there are."""
        return {Kind.ENGINES: self.engines, Kind.PRM: self.prm, **self.rewards}.get(kind)


class Gone(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The word of whoever started an engine that it will not serve any more."""

    kind: str
    engine_id: int
    request_id: int
    """The request that brought it."""
    reason: str


class NoRoom(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The word of the run's launcher that an engine finds too few GPUs."""

    reason: str


class DealtGpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process of a reward model that has joined may be started: who leaves in the same call has left."""

    kind: str
    number: int
    request_id: int
    """The request that brought it."""
    gpu: str = ""
    """UUID of its GPU; empty on a machine without any."""


class DealtGpus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the run's launcher has dealt to processes of reward models that have joined."""

    dealt: Annotated[tuple[DealtGpu, ...], msgspec.Meta(max_length=MAX_ENGINES)] = ()


_T = TypeVar("_T", ScaleRequest, Members, Gone, NoRoom, DealtGpus, TrainerRanks, TrainerFailed, RolesRecord)


class ScaleFolder:
    """`<run>/scale`. Every file is written whole or not at all. Raises `ConfigError` for a damaged one."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / "scale"

    def ask(self, request: ScaleRequest) -> None:
        """Ask the orchestrator for a number of engines. Each request is a file of its own: who asks at the same moment takes no other's
        place."""
        self._write(f"request-{request.request_id}.json", request)

    def withdraw(self, request: ScaleRequest) -> None:
        """Ask no more, where nobody has answered."""
        (self._folder / f"request-{request.request_id}.json").unlink(missing_ok=True)

    def asked(self, *, after: int) -> ScaleRequest | None:
        """Return the oldest request that is newer than the one answered last, `after`; None where there is none. Those before it are
        removed; a damaged one is an error once."""
        for number, path in sorted((int(path.stem.removeprefix("request-")), path) for path in self._folder.glob("request-[0-9]*.json")):
            if number <= after:
                path.unlink(missing_ok=True)
                continue
            try:
                return self._read(path, ScaleRequest)
            except ConfigError:
                path.unlink(missing_ok=True)
                raise
        return None

    def publish(self, members: Members) -> None:
        """Say which engines the run has; the orchestrator alone does."""
        self._write("engines.json", members)

    def members(self) -> Members | None:
        """Return the engines of the run; None where no orchestrator has said which."""
        return self._read(self._folder / "engines.json", Members)

    def with_state(self, *states: State) -> frozenset[tuple[str, int]]:
        """Return the engines of any kind that are in one of these states."""
        found = self.members()
        records = {} if found is None else found.by_kind()
        return frozenset((kind, one.engine_id) for kind, record in records.items() for one in record.members if one.state in states)

    def deal(self, dealt: DealtGpus) -> None:
        """Say which processes of reward models may be started, on which GPUs; the run's launcher alone does."""
        self._write("reward-gpus.json", dealt)

    def forget_dealt(self) -> None:
        """Take back what was dealt: those who had it are gone."""
        (self._folder / "reward-gpus.json").unlink(missing_ok=True)

    def dealt(self) -> DealtGpus:
        """Return what the run's launcher has dealt to processes of reward models."""
        return self._read(self._folder / "reward-gpus.json", DealtGpus) or DealtGpus()

    def tell_gone(self, gone: Gone) -> None:
        """Leave word that an engine will not serve any more."""
        self._write(f"gone-{gone.kind}-{gone.engine_id}-{gone.request_id}.json", gone)

    def take_gone(self) -> list[Gone]:
        """Return what was said of engines that are gone since the last call. A damaged file is an error once."""
        found = []
        for path in sorted(self._folder.glob("gone-*.json")):
            try:
                gone = self._read(path, Gone)
            finally:
                path.unlink(missing_ok=True)
            if gone is not None:
                found.append(gone)
        return found

    def tell_no_room(self, engine_id: int, reason: str) -> None:
        """Leave word that an engine of another width finds too few GPUs while those of before have them."""
        self._write(f"no-room-{engine_id}.json", NoRoom(reason=reason))

    def take_no_room(self) -> list[int]:
        """Return the engines of which that was said since the last call."""
        found = sorted(self._folder.glob("no-room-[0-9]*.json"))
        for path in found:
            path.unlink(missing_ok=True)
        return [int(number) for path in found if (number := path.stem.removeprefix("no-room-")).isdecimal()]

    def tensor_parallel_size(self, engine_id: int) -> int | None:
        """Return that of an engine; None where no orchestrator has said one."""
        found = self.members()
        return next((one.tensor_parallel_size for one in found.members if one.engine_id == engine_id), None) if found is not None else None

    def publish_trainer(self, ranks: TrainerRanks) -> None:
        """Say how many ranks the trainer has; the orchestrator alone does."""
        self._write("trainer.json", ranks)

    def trainer(self) -> TrainerRanks | None:
        """Return the trainer's ranks; None where no orchestrator has said how many."""
        return self._read(self._folder / "trainer.json", TrainerRanks)

    def tell_trainer_failed(self, epoch: int, reason: str) -> None:
        """Leave word that the trainer of a change does not start."""
        self._write("trainer-failed.json", TrainerFailed(epoch=epoch, reason=reason))

    def trainer_failed(self) -> TrainerFailed | None:
        """Return the last word about a trainer that does not start; None where there was none."""
        return self._read(self._folder / "trainer-failed.json", TrainerFailed)

    def remember_roles(self, record: RolesRecord) -> None:
        """Leave to the orchestrator that follows what the rule of elastic roles knows."""
        self._write("elastic.json", record)

    def roles(self) -> RolesRecord | None:
        """Return what the rule of elastic roles of an earlier orchestrator has left; None where there was none."""
        return self._read(self._folder / "elastic.json", RolesRecord)

    def _write(self, name: str, value: msgspec.Struct) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        draft = self._folder / f".{name}.{os.getpid()}"
        draft.write_bytes(msgspec.json.encode(value))
        draft.replace(self._folder / name)

    def _read(self, path: Path, kind: type[_T]) -> _T | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"{path} is not what this program writes there: {error}. Remove it") from None


def is_own(
    run_folder: Path,
    engine_id: int,
    started_by: StartedBy,
    kind: str = Kind.ENGINES,
    *,
    request_id: int = 0,
    tensor_parallel_size: int | None = None,
) -> bool:
    """Return whether an engine is (still) to be started by whoever starts its kind, as the one that a request brought, with this
    `tensor_parallel_size` (None: any); before the orchestrator has spoken it is."""
    found = ScaleFolder(run_folder).members()
    members = None if found is None else found.of(kind)
    known = {member.engine_id: member for member in members.members} if members is not None else {}
    member = known.get(engine_id)
    if member is None:
        return True
    is_other = None not in (tensor_parallel_size, member.tensor_parallel_size) and tensor_parallel_size != member.tensor_parallel_size
    is_same = (member.started_by, member.request_id) == (started_by, request_id)
    return is_same and member.state not in (State.LEFT, State.DRAINING) and not is_other
