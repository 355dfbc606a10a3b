"""Which weights the engines hold, and how others come to them: one publication at a time, to every engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from typing import NoReturn

import msgspec

from orchestrator.peers.engines import Engine, Engines
from orchestrator.rules.residency import Residency, Use
from orchestrator.serving.trainer import Trainer
from pipelinerl.messages import (
    LayoutFixed,
    PolicyPublished,
    PublishModel,
    StageWeights,
    WeightBufferReleased,
    WeightsCommitted,
    WeightsRefused,
    WeightsStaged,
)
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.stage import Signal
from pipelinerl.tinker.backend import Publication, Refusal, TrainerLost, Weights
from pipelinerl.tinker.ledger import Ledger

MAX_ATTEMPTS = 5
"""Times that weights are brought, where an engine is replaced meanwhile. More only repeats what fails."""


class _EngineRefused(Refusal):
    """An engine could not take weights."""


class _EngineReplaced(Refusal):
    """An engine that was to take weights is lost; the one in its place knows nothing of them."""

    def __init__(self) -> None:
        super().__init__(f"engines were replaced {MAX_ATTEMPTS} times while they were to take the weights", is_asker_wrong=False)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Publications:
    """Brings weights to the engines when somebody is to sample from them, or their model publishes them.

    Saved weights are equal for ever; a model as it goes is known by its name, and what is held of it is what it published last.
    """

    engines: Engines
    trainer: Trainer
    residency: Residency[Weights]
    journal: Journal
    commit_deadline_s: float
    layout: Callable[[], LayoutFixed]
    num_steps: Callable[[str], int]
    """Optimizer steps of a model that the trainer was asked for so far."""
    ledger: Ledger
    caught_up: asyncio.Event = dataclasses.field(default_factory=asyncio.Event, init=False)
    """Set while the trainer was given all that a trainer before it had: what a model publishes as it goes is never older than before."""
    publications: dict[int, Publication] = dataclasses.field(default_factory=lambda: {0: Publication(model_id="", num_steps=0)}, init=False)
    """By version, of every server of this run."""
    _lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock, init=False)
    _changed: Signal = dataclasses.field(default_factory=Signal, init=False)
    _is_waiting: bool = dataclasses.field(default=False, init=False)
    """Somebody waits for sequences to end."""
    _num_joined: int = dataclasses.field(default=0, init=False)
    """Engines that have joined so far."""
    _next: int = dataclasses.field(default=1, init=False)
    _buffers: list[str] = dataclasses.field(default_factory=list, init=False)
    """Buffers that the trainer may not write again, oldest first."""
    _refused: dict[int, str] = dataclasses.field(default_factory=dict, init=False)
    """The words of an engine that could not take a version."""

    def __post_init__(self) -> None:
        for version, model_id, num_steps in self.ledger.publications():
            self.publications[version] = Publication(model_id=model_id, num_steps=num_steps)
        self._next = max(self.publications) + 1
        self.engines.on_policy(WeightsStaged, lambda engine, said: None)
        self.engines.on_policy(WeightsCommitted, self._on_committed)
        self.engines.on_policy(WeightsRefused, self._on_refused)
        self.engines.on_joined(self._on_joined)

    async def begin(self, weights: Weights) -> Use[Weights]:
        """Wait until sequences may begin under these weights; say so with `end` when they have ended. Raises `Refusal`."""
        while True:
            version = self.residency.find(weights)
            if version is None:
                with contextlib.suppress(TrainerLost):  # another has taken its place
                    await self.publish(weights, unless_held=True)
            elif self._is_waiting:
                await self._changed.wait()
            else:
                return self.residency.begin(version)

    def end(self, use: Use[Weights]) -> None:
        """Say that the sequences of one `begin` have ended."""
        self.residency.end(use)
        self._changed.set()

    def lost(self, version: int) -> None:
        """Say that an engine does not hold a version."""
        self.residency.lost(version)

    async def publish(self, weights: Weights, *, unless_held: bool = False) -> int:
        """Bring weights to every engine, as they are now; the version they have there. Raises `Refusal`, `TrainerLost` among these."""
        if weights.model_id and not weights.folder:
            await self.caught_up.wait()
        async with self._lock:
            if unless_held and (version := self.residency.find(weights)) is not None:
                return version
            await self._wait_for_room(weights)
            self.residency.reserve(weights)
            num_refused = 0
            for _ in range(MAX_ATTEMPTS - 1):
                try:
                    return await self._bring(weights)
                except _EngineReplaced:
                    pass
                except _EngineRefused:  # the buffer went with a trainer that was lost, or it is damaged: then so is the next one
                    num_refused += 1
                    if num_refused == 2:
                        raise
                self.residency.reserve(weights)
            return await self._bring(weights)

    async def _bring(self, weights: Weights) -> int:
        """Bring weights to every engine once. Raises `Refusal`, `_EngineReplaced` and `TrainerLost` among these."""
        version, self._next = self._next, self._next + 1
        steps = weights.num_steps if weights.folder or not weights.model_id else self.num_steps(weights.model_id)
        source = {"folder": weights.folder} if weights.folder else {"model_id": weights.model_id}
        policy = await self.trainer.publish(PublishModel(request_id=0, version=version, **source))
        self.publications[version] = Publication(model_id=weights.model_id, num_steps=steps)
        self.ledger.was_published(version, model_id=weights.model_id, num_steps=steps)
        self._buffers.append(policy.buffer)
        try:
            await self._commit(policy)
        except Refusal:
            self.residency.lost()  # some engines may have taken it, and others not
            raise
        self.residency.published(version, weights)
        for buffer in self._buffers[:-1]:
            self.trainer.tell(WeightBufferReleased(buffer=buffer))
        del self._buffers[:-1]
        self.journal.write("publication", version=version, model_id=weights.model_id, step=steps, folder=weights.folder)
        self._changed.set()
        return version

    @property
    def newest(self) -> int:
        """The newest version that there is, or was for an earlier server."""
        return self._next - 1

    def begin_anew(self) -> None:
        """Tell a trainer that starts how to publish; the buffers of the one before are gone."""
        self._buffers.clear()
        if self.trainer.ready is not None:
            self._next = max(self._next, self.trainer.ready.version + 1)
        self.trainer.tell(self.layout())

    async def _wait_for_room(self, weights: Weights) -> None:
        self._is_waiting = True
        try:
            while not self.residency.has_room_for(weights):
                await self._changed.wait()
        finally:
            self._is_waiting = False
            self._changed.set()

    async def _commit(self, policy: PolicyPublished) -> None:
        """Have every engine take a policy, and wait until all have."""
        num_joined = self._num_joined
        order = StageWeights(version=policy.version, buffer=policy.buffer, digest=policy.digest)
        for engine in self.engines:
            engine.ordered(version=order.version, rollback_epoch=0)
            self.engines.peers.send(engine.peer, order)
        try:
            async with asyncio.timeout(self.commit_deadline_s):
                while not self.engines.all_hold(policy.version):
                    if words := self._refused.pop(policy.version, ""):
                        raise _EngineRefused(f"an engine could not take the weights: {words}", is_asker_wrong=False)
                    if self._num_joined != num_joined:
                        raise _EngineReplaced
                    await self.engines.changed.wait()
        except TimeoutError:
            words = f"waited {self.commit_deadline_s:g} s for every engine to take version {policy.version}"
            raise Refusal(words, is_asker_wrong=False) from None

    def _on_committed(self, engine: Engine, committed: WeightsCommitted) -> None:
        self.journal.write("swap", **msgspec.structs.asdict(committed))
        self.engines.committed(engine, committed.version)
        self.engines.changed.set()

    def _on_refused(self, engine: Engine, refused: WeightsRefused) -> None:
        self.journal.write("refused", **msgspec.structs.asdict(refused))
        self._refused[refused.version] = refused.error
        self.engines.changed.set()

    def _on_joined(self, engine: Engine) -> None:
        """An engine that takes the place of another holds nothing of what the others hold, and one that has outlived a server nobody knows
        what: all is brought anew, when it is needed. What an earlier server had asked for is dropped."""
        engine.newest_told = engine.ready.version
        self._num_joined += 1
        self.engines.changed.set()
        if self._next > 1 or engine.ready.version:
            self.residency.lost()
            self._changed.set()
        self._next = max(self._next, engine.ready.version + 1)
        self.engines.requests.reattach((), engine.engine_id, sink=_nobody, lost=_nobody, refused=_nobody)


def _nobody(rollout_id: str) -> NoReturn:
    raise AssertionError(f"{rollout_id}: nothing of an earlier server is awaited")
