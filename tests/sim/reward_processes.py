"""A scorer with one reward model on simulated time: its processes are coroutines, and the product's own rules say which there are and which
call goes to which of them (`rewards.pool`)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Collection

from pipelinerl.config.scoring import RewardSection
from pipelinerl.messages import CancelRequest, Outcome, Request, Result, ScorerLoad, ScorerReady, Stop, ToScorer
from pipelinerl.observe.journal import Journal
from pipelinerl.rewards.pool.plan import MAX_BATCH
from pipelinerl.rewards.pool.processes import ModelProcesses, RunProcesses
from pipelinerl.rewards.pool.queue import Queue
from tests.sim import peers
from tests.sim.memory import MemoryLink
from tests.sim.run import Beside

NAME = "orm"
"""The model's, among rewards."""


@dataclasses.dataclass
class Speed:
    """How fast the model is."""

    load_s: float = 1.0
    batch_s: float = 0.3
    """A batch, whatever is in it."""
    token_s: float = 0.0
    """How much longer it takes for each token."""


class Scorer:
    """One scorer process; kill it, and start another in its place."""

    def __init__(
        self,
        given: Beside,
        *,
        journal: Journal,
        speed: Speed,
        count: int = 1,
        cannot_load: Collection[int] = (),
        model: str = "reward.0",
        gpus: Collection[str] = (),
    ) -> None:
        """Processes of the numbers `cannot_load` end while they load."""
        self._given, self._speed, self._cannot_load = given, speed, cannot_load
        self.queue = Queue(num_slots=RewardSection.model_validate({"concurrency": count}).most, deadline_s=60.0, batch=MAX_BATCH)
        self.given_up: dict[int, str] = {}
        self.gpus: dict[int, str] = {}
        """Of each process that was ever started."""
        self.scored: dict[int, int] = {}
        """Completions, by process."""
        self.asked_twice = 0
        self.num_charged = 0
        """Calls that failed, as two processes were killed over them."""
        self._loaded: set[int] = set()
        self._loads: dict[int, asyncio.Task[None]] = {}
        self._batches: dict[int, asyncio.Task[None]] = {}
        self._work = asyncio.Event()
        self._busy_s = 0.0
        self._began_s: dict[int, float] = {}
        self._processes = ModelProcesses(self, self.queue, model=model, count=count, gpus=tuple(gpus))
        self._folder = RunProcesses([self._processes], folder=given.folder, journal=journal)
        self._link: MemoryLink = given.scorer_hub.connect("scorer-0", accepts=ToScorer)
        self._task = asyncio.create_task(self._serve())

    async def kill(self) -> None:
        """Kill it with all its processes, at once."""
        for task in (self._task, *self._loads.values(), *self._batches.values()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._link.close()

    async def kill_process(self, number: int) -> None:
        """Kill a process of the model: it loads again, or not, where it was to leave."""
        for tasks in (self._loads, self._batches):
            if (task := tasks.pop(number, None)) is not None:
                task.cancel()
        if (charged := self.queue.lose(number)) is not None:  # it was alone, as its first process had died over it, too
            self.num_charged += 1
            request_id = charged.request.request_id
            self._link.send(Result(request_id=request_id, outcome=Outcome.ERROR, error=f"{NAME}: its process was killed"))
        self._loaded.discard(number)
        if number in self._closed:
            self.end_slot(number)
        else:
            self.start_slot(number, gpu=self.gpus[number], is_spare=True)
        self._work.set()

    # --- slots, as `rewards.pool.pool` has them ---

    @property
    def slots(self) -> list[int]:
        return sorted({*self._loads, *self._loaded})

    @property
    def _closed(self) -> set[int]:
        return self._processes._closed

    def is_loaded(self, slot: int) -> bool:
        return slot in self._loaded

    def start_slot(self, slot: int, *, gpu: str, is_spare: bool) -> None:
        self.gpus[slot] = gpu
        self.given_up.pop(slot, None)
        self._loads[slot] = asyncio.create_task(self._load(slot, is_spare=is_spare))

    def close_slot(self, slot: int, *, is_closed: bool) -> None:
        if is_closed:
            self.queue.close(slot)
        elif slot in self._loaded:
            self.queue.open(slot)
            self._work.set()

    def end_slot(self, slot: int) -> None:
        for tasks in (self._loads, self._batches):
            if (task := tasks.pop(slot, None)) is not None:
                task.cancel()
        self.asked_twice += self.queue.num_held(slot)
        self._loaded.discard(slot)
        self.queue.release(slot)
        self._work.set()

    async def _load(self, slot: int, *, is_spare: bool) -> None:
        await asyncio.sleep(self._speed.load_s)
        del self._loads[slot]
        if slot in self._cannot_load:
            assert is_spare
            self.given_up[slot] = "its GPU has no room"
            return
        self._loaded.add(slot)
        if slot not in self._closed:
            self.queue.open(slot)
        self._work.set()

    # --- what a scorer does ---

    async def _serve(self) -> None:
        self._folder.follow()
        while not self._loaded:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        ready = ScorerReady(scorer_id=0, process_id=next(peers.process_ids), num_slots=2)
        self._link.introduce(lambda kept: [ready])
        async with asyncio.TaskGroup() as group:
            group.create_task(self._hand_out())
            group.create_task(self._report())
            while not isinstance(message := await self._link.wait(), Stop):
                if isinstance(message, CancelRequest):
                    self.queue.cancel(message.request_id)
                elif isinstance(message, Request):
                    self.queue.add(message)
                self._work.set()
            raise asyncio.CancelledError

    async def _hand_out(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._work.wait()
            self._work.clear()
            for slot, tickets in self.queue.hand_out(loop.time()).items():
                self._batches[slot] = asyncio.create_task(self._score(slot, [(one.call_id, one.request) for one in tickets]))

    async def _score(self, slot: int, calls: list[tuple[int, Request]]) -> None:
        loop = asyncio.get_running_loop()
        num_tokens = sum(len(one) for _, request in calls for one in request.task.completions)
        seconds = self._speed.batch_s + self._speed.token_s * num_tokens
        self._began_s[slot] = loop.time()
        try:
            await asyncio.sleep(seconds * (0.75 + 0.5 * random.Random(calls[0][0]).random()))
        finally:
            self._busy_s += loop.time() - self._began_s.pop(slot)
        for call_id, request in calls:
            if (ticket := self.queue.answered(slot, call_id, loop.time(), duration_s=seconds / len(calls))) is None:
                continue
            self.scored[slot] = self.scored.get(slot, 0) + 1
            reward = float(request.task.completions[0].sum() % 2)
            self._link.send(
                Result(
                    request_id=ticket.request.request_id,
                    outcome=Outcome.OK,
                    rewards=(reward,),
                    components=({NAME: reward},),
                    duration_s=seconds,
                )
            )
        self._work.set()

    async def _report(self) -> None:
        loop = asyncio.get_running_loop()
        told: object = None
        next_s = loop.time()
        while True:
            if loop.time() >= next_s:
                next_s += 1.0
                self._folder.follow()
                told = None
            if (state := self._processes.state()) != told:
                told = state
                busy_s = self._busy_s + sum(loop.time() - began_s for began_s in self._began_s.values())
                models = {self._processes.model: self._processes.load(busy_s=busy_s)}
                self._link.send(ScorerLoad(scorer_id=0, num_running=0, num_scored=0, busy_s=busy_s, models=models))
            await asyncio.sleep(0.05)
