"""A simulated trainer of several replicas on a disk of its own, and who starts it: with as many ranks as the orchestrator says."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
from typing import Any

from pipelinerl.messages import (
    CheckpointSaved,
    LayoutFixed,
    MicroBatch,
    PolicyPublished,
    SaveCheckpoint,
    StepClosed,
    StepDone,
    Stop,
    TakeMicroBatch,
    ToTrainer,
    TrainerReady,
    WeightBufferReleased,
)
from pipelinerl.runtime.membership import ScaleRequest
from pipelinerl.runtime.trainer_ranks import Phase
from tests.sim import peers
from tests.sim.memory import MemoryLink
from tests.sim.run import Beside


@dataclasses.dataclass(slots=True)
class Disk:
    """The newest checkpoint."""

    version: int = 0
    commit: str = ""


class Group:
    """One process group: replicas that train the same step, each with rows of its own."""

    _ids = itertools.count(100)

    def __init__(self, beside: Beside, disk: Disk, *, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self.stops: list[str] = []
        """Reasons for which it was told to end."""
        self._beside, self._disk, self._record = beside, disk, beside.record
        self._process_id = next(self._ids)
        self._barrier = asyncio.Barrier(num_replicas)
        self._version, self._commit = disk.version, disk.commit
        self._free = ["a", "b", "c"]
        self._kept = collections.deque[Any]()
        """What has come for the first replica while it waited for a buffer."""
        _undo(self._record, self._version)
        self.tasks = [asyncio.create_task(self._replica(number)) for number in range(num_replicas)]

    @property
    def is_over(self) -> bool:
        return all(task.done() for task in self.tasks)

    async def kill(self) -> None:
        for task in self.tasks:
            task.cancel()
        for task in self.tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _replica(self, number: int) -> None:
        await asyncio.sleep(1.0)  # it loads, and connects after that
        link = self._beside.trainer_hub.connect(f"trainer-{number}", accepts=ToTrainer)
        signs = asyncio.create_task(peers.live_on(link))
        try:
            link.introduce(lambda kept: [self._ready(number)])
            if number == 0:
                while not isinstance(await link.wait(), LayoutFixed):
                    pass
                if self._version:
                    await self._publish(link)
            for step in range(self._version, self._beside.settings.trainer.steps):
                if not await self._step(number, link, step):
                    return
            while not isinstance(await link.wait(), Stop):
                pass
        finally:
            signs.cancel()
            link.close()

    def _ready(self, number: int) -> TrainerReady:
        named: dict[str, Any] = {"version": self._version, "commit": self._commit}
        return TrainerReady(replica=number, num_replicas=self.num_replicas, process_id=self._process_id * 10 + number, **named)

    async def _step(self, number: int, link: MemoryLink, step: int) -> bool:
        """Train a step; return False where this replica was told to end."""
        index, working_s = 0, 0.0
        clock = asyncio.get_running_loop().time
        while True:
            link.send(TakeMicroBatch(replica=number, step=step, index=index))
            answer = await self._answer(link)
            while isinstance(answer, SaveCheckpoint):
                assert index == 0, "a command comes before any row of the step that follows"
                await self._save(number, link)
                answer = await self._answer(link)
            if isinstance(answer, Stop):
                self.stops.append(answer.reason)
                return False
            if isinstance(answer, StepClosed):
                break
            assert isinstance(answer, MicroBatch)
            peers.note(answer, self._record)
            self._record.micro_batches[step] -= number > 0  # a round is one row of each replica
            began = clock()
            await asyncio.sleep(self._beside.world.token_s * len(answer.token_ids))
            working_s += clock() - began
            index += 1
        self._record.sealed[step] = answer
        await self._barrier.wait()
        self._version, self._commit = step + 1, answer.commit
        if number == 0:
            figures = {"loss": 0.0, "num_tokens": float(answer.num_tokens)}
            figures |= {"tokens_per_s": answer.num_tokens / working_s} if working_s else {}
            link.send(StepDone(step=step, metrics=figures, engines=peers._engines(self._record)))
            await self._publish(link)
            if self._version % self._beside.settings.checkpoint.every == 0 or self._version == self._beside.settings.trainer.steps:
                self._write(link)
        await self._barrier.wait()
        return True

    async def _answer(self, link: MemoryLink) -> Any:
        while True:
            message = self._kept.popleft() if self._kept and link.name == "trainer-0" else await link.wait()
            if isinstance(message, WeightBufferReleased):
                self._free.append(message.buffer)
            if isinstance(message, MicroBatch | StepClosed | SaveCheckpoint | Stop):
                return message

    async def _publish(self, link: MemoryLink) -> None:
        while not self._free:
            message = await link.wait()
            if isinstance(message, WeightBufferReleased):
                self._free.append(message.buffer)
            else:
                self._kept.append(message)
            assert not isinstance(message, Stop), "it is told to end once engines have its policy"
        link.send(PolicyPublished(version=self._version, buffer=self._free.pop(0), digest="", num_bytes=0, publish_s=0.0))

    async def _save(self, number: int, link: MemoryLink) -> None:
        await self._barrier.wait()
        await asyncio.sleep(0.5)
        if number == 0:
            self._write(link)
        await self._barrier.wait()

    def _write(self, link: MemoryLink) -> None:
        if self._disk.version != self._version:
            self._disk.version, self._disk.commit = self._version, self._commit
        link.send(CheckpointSaved(version=self._version, commit=self._commit, num_bytes=0, save_s=0.0))


def _undo(record: peers.TrainerRecord, version: int) -> None:
    """Forget what was trained after a checkpoint: it is trained again."""
    for rollout_id in [name for name, step in record.trained.items() if step >= version]:
        for known in (record.trained, record.oldest, record.num_tokens, record.turns, record.weights):
            known.pop(rollout_id, None)
    for counts in (record.tokens, record.samples, record.micro_batches, record.sealed, record.losses):
        for step in [step for step in counts if step >= version]:
            del counts[step]
    record.engines.clear()


class Launcher:
    """Starts the trainer, again where it was killed, and anew for each change, one for each epoch."""

    def __init__(self, beside: Beside, *, fails: tuple[int, ...] = (), hangs: tuple[int, ...] = (), disk: Disk | None = None) -> None:
        """A trainer of so many ranks in `fails` ends with an error of its own; one in `hangs` never says a word. `disk` may hold the
        checkpoint of a run that goes on."""
        self.started: list[int] = []
        """Ranks of every trainer that was started."""
        self.groups: list[Group] = []
        self._beside, self._disk, self._fails, self._hangs = beside, disk or Disk(), fails, hangs
        self._epoch = 0
        self._requests = 0

    def ask(self, *, engines: int | None = None, trainer: int | None = None, drain_s: float = 5.0) -> None:
        found = self._beside.folder.members()
        self._requests = max(self._requests, found.request_id if found is not None else 0) + 1
        self._beside.folder.ask(ScaleRequest(request_id=self._requests, engines=engines, trainer=trainer, drain_s=drain_s))

    async def run(self) -> None:
        record = self._beside.folder.trainer()
        self._epoch = 0 if record is None else record.epoch
        if record is not None and record.phase is Phase.STARTING:
            self._try(record.ranks)
        else:
            self._start(self._beside.settings.trainer.ranks if record is None else record.ranks)
        try:
            while True:
                await asyncio.sleep(0.1)
                await self._look()
        finally:
            for group in self.groups:
                await group.kill()

    async def kill(self) -> None:
        """Kill the trainer that is there, and start another one as its launcher would."""
        if self.groups:
            await self.groups[-1].kill()
            await asyncio.sleep(0.3)
            record = self._beside.folder.trainer()
            if self.groups[-1].is_over and not self._is_due():
                self._start(record.ranks if record is not None else self._beside.settings.trainer.ranks)

    async def _look(self) -> None:
        record = self._beside.folder.trainer()
        if record is None or not self._is_due():
            return
        if not all(group.is_over for group in self.groups) and not record.is_back:
            return
        for group in self.groups[-1:]:
            await group.kill()
        self._epoch = record.epoch
        self._try(record.ranks)

    def _try(self, ranks: int) -> None:
        if ranks in self._fails:
            self._beside.folder.tell_trainer_failed(self._epoch, f"{ranks} ranks have no room")
        elif ranks not in self._hangs:
            self._start(ranks)

    def _is_due(self) -> bool:
        record = self._beside.folder.trainer()
        return record is not None and record.phase is Phase.STARTING and record.epoch > self._epoch

    def _start(self, ranks: int) -> None:
        self.started.append(ranks)
        self.groups.append(Group(self._beside, self._disk, num_replicas=ranks))

    async def settled(self, *, after: int) -> Any:
        """Wait until the change of this epoch, or a later one, is over; return the trainer's ranks then."""
        while (record := self._beside.folder.trainer()) is None or record.epoch < after or record.phase is not Phase.SETTLED:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return record


async def nobody(*args: Any, **named: Any) -> None:
    """A trainer that somebody else starts."""
