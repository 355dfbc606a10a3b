"""Which processes of a reward model its scorer has: those that the run's orchestrator says (`pipelinerl scale`, `reward.1=2`).

The scorer reads that in the run's folder once a second, as launchers read which engines they are to start, and makes it so: a process that
joins is started once the run's launcher has dealt it a GPU; one that drains gets no further batch; one that has left is ended, and what it
still had is asked of others. So it does not matter which of orchestrator, launcher and scorer was killed meanwhile: whoever comes again
finds the same file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from pipelinerl.errors import ConfigError
from pipelinerl.messages import RewardModelLoad, RewardProcess
from pipelinerl.observe.journal import Journal
from pipelinerl.rewards.pool.queue import Queue
from pipelinerl.runtime.membership import DealtGpu, Member, Members, ScaleFolder, StartedBy, State

PRESENT = (State.JOINING, State.LIVE)


class Slots(Protocol):
    """The slots of a reward model, each with a process."""

    given_up: dict[int, str]

    @property
    def slots(self) -> list[int]: ...
    def is_loaded(self, slot: int) -> bool: ...
    def start_slot(self, slot: int, *, gpu: str, is_spare: bool) -> None: ...
    def close_slot(self, slot: int, *, is_closed: bool) -> None: ...
    def end_slot(self, slot: int) -> None: ...


class ModelProcesses:
    """The processes of one reward model."""

    def __init__(self, slots: Slots, queue: Queue, *, model: str, count: int, gpus: Sequence[str] = ()) -> None:
        """The run begins with `count` of them, on these `gpus`; `model` is the key of its section."""
        self.model = model
        self._slots, self._queue = slots, queue
        self._count, self._gpus = count, gpus
        self._request_ids: dict[int, int] = {}
        """Of each process, the request that brought it."""
        self._closed: set[int] = set()

    @property
    def has_begun(self) -> bool:
        """True once processes were started."""
        return bool(self._request_ids)

    def follow(self, members: Members | None, dealt: Iterable[DealtGpu] = ()) -> None:
        """Start, close and end processes, until they are those of `members`; None where no orchestrator has said which."""
        if members is None or members.count != self._count:  # of other settings, which an orchestrator that starts does not go on with
            members = Members(members=self._configured(), num_wanted=self._count, count=self._count)
        gpus = {(one.number, one.request_id): one.gpu for one in dealt if one.kind == self.model}
        wanted = {one.engine_id: one for one in members.members if one.state in (*PRESENT, State.DRAINING)}
        for number in self._slots.slots:
            member = wanted.get(number)
            if member is None or member.request_id != self._request_ids[number]:
                self._slots.end_slot(number)
        self._closed &= set(self._slots.slots)
        for number, member in wanted.items():
            self._follow(number, member, gpus)

    def load(self, *, busy_s: float) -> RewardModelLoad:
        """Return what there is of the model."""
        there = {number: self._of(number) for number in self._slots.slots}
        lost = {
            number: RewardProcess(brought_by=str(self._request_ids[number]), is_loaded=False, failed=reason)
            for number, reason in self._slots.given_up.items()
        }
        return RewardModelLoad(processes=there | lost, busy_s=busy_s)

    def state(self) -> object:
        """Return what the orchestrator waits to hear of; it differs from before where something has happened."""
        return [(one.is_loaded, one.is_closed and not one.num_held, one.failed) for one in self.load(busy_s=0.0).processes.values()]

    def _of(self, number: int) -> RewardProcess:
        return RewardProcess(
            brought_by=str(self._request_ids[number]),
            is_loaded=self._slots.is_loaded(number),
            is_closed=number in self._closed,
            num_held=self._queue.num_held(number),
        )

    def _follow(self, number: int, member: Member, gpus: Mapping[tuple[int, int], str]) -> None:
        is_leaving, is_there = member.state is State.DRAINING, number in self._slots.slots
        if is_there and is_leaving != (number in self._closed):
            (self._closed.add if is_leaving else self._closed.discard)(number)
            self._slots.close_slot(number, is_closed=is_leaving)
        if is_there or is_leaving or (number in self._slots.given_up and self._request_ids[number] == member.request_id):
            return
        if not member.request_id:
            gpu = self._gpus[number] if self._gpus else ""
        elif (gpu := gpus.get((number, member.request_id))) is None:
            return  # its GPU may still be somebody's who leaves
        self._request_ids[number] = member.request_id
        self._slots.start_slot(number, gpu=gpu, is_spare=bool(member.request_id))

    def _configured(self) -> tuple[Member, ...]:
        numbers = range(self._count)
        return tuple(Member(engine_id=number, state=State.JOINING, started_by=StartedBy.RUN) for number in numbers)


class RunProcesses:
    """The processes of all reward models of a scorer, as a run's folder says."""

    def __init__(self, models: Sequence[ModelProcesses], *, folder: ScaleFolder | None, journal: Journal) -> None:
        """Without a folder the models keep the processes that they begin with."""
        self._models, self._folder, self._journal = models, folder, journal
        self._damage = ""
        """What was said last of a damaged file, which stays as it is."""

    def follow(self) -> None:
        """Make the processes those that the folder says."""
        if not self._models:
            return
        found, dealt = None, ()
        if self._folder is not None:
            try:
                found, dealt = self._folder.members(), self._folder.dealt().dealt
            except ConfigError as error:  # a damaged file is nobody's word
                if self._damage != str(error):
                    self._damage = str(error)
                    self._journal.write("choice", text=f"reward models keep their processes: {error}")
                if any(model.has_begun for model in self._models):
                    return
        for model in self._models:
            model.follow(found and found.of(model.model), dealt)
