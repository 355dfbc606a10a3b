"""Stage 6: every published policy is brought to every engine, each on its own schedule, and buffers are handed back to the trainer."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

import msgspec

from orchestrator.observe.progress import Progress
from orchestrator.peers.engines import Engine, Engines
from orchestrator.peers.peers import Peers
from orchestrator.rules.admission import Admission
from orchestrator.rules.kv import KvPolicy
from orchestrator.rules.swaps import Policy, Swaps
from orchestrator.rules.validation.violations import Kind, Violation, shorten
from pipelinerl.errors import PeerError, PeerRefused, PeerSilent
from pipelinerl.messages import (
    LayoutFixed,
    PolicyHeld,
    PolicyPublished,
    StageWeights,
    TrainerReady,
    WeightBufferReleased,
    WeightsCommitted,
    WeightsRefused,
    WeightsStaged,
)
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.stage import Channel, Signal

MAX_UNORDERED = 8
"""Policies that one process may refuse although this orchestrator never told it to fetch them: an earlier orchestrator did, or an earlier
trainer, whose buffers are gone with it. A larger value only lets a dishonest one fill the journal.
"""


class WeightSync:
    """The stage that tells engines what to fetch and follows each to its commit. An engine that fails or is late is fenced and refilled.

    The newest policy's buffer is never handed back, so an engine that joins late can always be brought to it. Buffers die with the trainer
    that made them: one that starts again publishes anew, and earlier orders to engines are forgotten.

    takes     TrainerReady and PolicyPublished, from training; WeightsStaged, WeightsCommitted and WeightsRefused, from engines; engines
              that join or are lost
    gives     StageWeights, to engines; LayoutFixed, WeightBufferReleased and PolicyHeld, to the trainer; credits, to generation
    waits for every open order, each apart, so a slow engine holds up nobody else
    woken by  engines
    fails     PeerSilent or PeerRefused, with the last engine's own words, once every engine is fenced and stays beyond refilling
    ends      when the run does
    """

    name = "weight_sync"

    def __init__(
        self,
        *,
        published: Channel[TrainerReady | PolicyPublished],
        engines: Engines,
        trainer: Peers,
        admission: Admission,
        credits: Signal,
        progress: Progress,
        journal: Journal,
        layout_for: Callable[[TrainerReady], LayoutFixed],
        commit_deadline_s: float,
        kv_policy: KvPolicy | None = None,
    ) -> None:
        """Take `kv_policy`, the limits on how far KV caches may lag; by default there are none."""
        self._kv_policy = kv_policy or KvPolicy()
        self._published = published
        self._engines = engines
        self._trainer = trainer
        self._admission = admission
        self._credits = credits
        self._progress = progress
        self._journal = journal
        self._layout_for = layout_for
        self._commit_deadline_s = commit_deadline_s
        self._swaps = Swaps()
        self._staged: dict[int, tuple[int, int]] = {}
        """The pair (rollback epoch, version) of the last policy that each engine said it has staged, by engine id."""
        self._num_unordered: collections.Counter[int] = collections.Counter()
        """Policies that an engine refused although this orchestrator never told it to fetch them, counted by engine id."""
        self._told: PolicyHeld | None = None
        """The last message to the trainer about what all engines hold; None before the first, while it assumes nothing."""
        self._has_news = False
        """True where there is something to tell the trainer."""
        self._news = Signal()
        self._tasks: asyncio.TaskGroup | None = None
        engines.peers.on(WeightsStaged, self._on_staged)
        engines.peers.on(WeightsCommitted, self._on_committed)
        engines.peers.on(WeightsRefused, self._on_refused)
        engines.on_joined(self._on_joined)
        engines.on_died(self._on_died)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            telling = self._tasks.create_task(self._tell())
            async for news in self._published:
                if isinstance(news, TrainerReady):
                    self._welcome(news)
                else:
                    self._announce(news)
            telling.cancel()

    # --- the trainer ---

    def _welcome(self, ready: TrainerReady) -> None:
        """Tell a trainer that starts the layout to publish in; the buffers of the one before are gone."""
        self._journal.write("trainer", version=ready.version)
        self._swaps.forget_buffers()
        self._told = None
        self._engines.forgive()  # what they refused may be what the dying trainer left
        self._trainer.send("trainer-0", msgspec.structs.replace(self._layout_for(ready), rollback_epoch=self._swaps.rollback_epoch))

    def _announce(self, published: PolicyPublished) -> None:
        self._journal.write("policy", **msgspec.structs.asdict(published))
        policy = Policy(age=(published.rollback_epoch, published.version), buffer=published.buffer, digest=published.digest)
        self._swaps.published(policy)
        self._admission.published(published.version)
        self._credits.set()
        for engine in self._engines:
            self._order(engine)
        self._tell_trainer()

    def _tell_trainer(self) -> None:
        """Have the trainer told which buffers are free, and what all engines hold. A trainer that has not published needs neither."""
        self._has_news = True
        self._news.set()

    async def _tell(self) -> None:
        """Tell the trainer once for all messages that arrive together, since each time every engine is looked at."""
        while True:
            while not self._has_news:
                await self._news.wait()
            self._has_news = False
            self._tell_now()

    def _tell_now(self) -> None:
        if self._swaps.newest is None:
            return
        for buffer in self._swaps.take_free_buffers():
            self._trainer.send("trainer-0", WeightBufferReleased(buffer=buffer))
        held = PolicyHeld(version=self._swaps.held_by_all(), rollback_epoch=self._swaps.rollback_epoch)
        if held != (self._told or PolicyHeld(version=None, rollback_epoch=held.rollback_epoch)):
            self._trainer.send("trainer-0", held)
        self._told = held

    # --- one engine ---

    def _order(self, engine: Engine) -> None:
        """Tell an engine to fetch the newest policy, unless it has an order already."""
        policy = self._swaps.next_order(engine.engine_id)
        if policy is None or self._tasks is None:
            return
        rollback_epoch, version = policy.age
        order = StageWeights(
            version=version,
            buffer=policy.buffer,
            digest=policy.digest,
            when_idle=self._admission.schedule.swaps_when_idle,
            rollback_epoch=rollback_epoch,
            kv_max_staleness=self._kv_policy.max_staleness,
            kv_max_mean_staleness=self._kv_policy.max_mean_staleness,
        )
        engine.ordered(version=version, rollback_epoch=rollback_epoch)
        if self._engines.peers.send(engine.peer, order):
            self._tasks.create_task(self._wait_for_commit(engine, policy))
        else:
            self._swaps.not_sent(engine.engine_id)

    async def _wait_for_commit(self, engine: Engine, policy: Policy) -> None:
        try:
            async with asyncio.timeout(self._commit_deadline_s):
                while self._engines.serves(engine) and self._swaps[engine.engine_id].ordered == policy.age:
                    await self._engines.changed.wait()
        except TimeoutError:
            reason = (
                f"waited {self._commit_deadline_s:g} s for {engine.peer} (at version {engine.version}) to commit policy {policy.age[1]}"
            )
            if self._swaps.late(engine.engine_id, policy.age, reason):
                error = PeerSilent(reason)
                self._fence(engine, error)
                if self._is_hopeless():
                    raise error from None

    def _fence(self, engine: Engine, error: PeerError) -> None:
        """Give an engine no new work."""
        self._engines.fence(engine, str(error))
        self._journal.write("fence", engine_id=engine.engine_id, version=engine.version, error=engine.fault)
        self._credits.set()

    def _is_hopeless(self) -> bool:
        """Return whether every engine is fenced, and no refill is under way."""
        return not self._engines.num_missing and all(
            engine.is_condemned or self._swaps[engine.engine_id].is_hopeless for engine in self._engines
        )

    async def _end_unless_refilled(self, error: PeerError) -> None:
        """End the run with `error` unless an engine is refilled in time.

        Engines may have refused what a dying trainer left, so the trainer that follows gets time to publish. The wait is half the deadline:
        at the whole of it the watchdog ends the run, without the engines' words.
        """
        try:
            async with asyncio.timeout(self._commit_deadline_s / 2):
                while self._is_hopeless():
                    await self._engines.changed.wait()
        except TimeoutError:
            raise error from None

    # --- for evaluations ---

    def pin(self, engine: Engine) -> None:
        """Have an engine keep its version, once it has ended the swap that is under way; the others go on."""
        self._pin(engine, is_pinned=True)

    def is_settled(self, engine: Engine) -> bool:
        """Return whether an engine has no swap under way."""
        return self._swaps[engine.engine_id].ordered is None

    def unpin(self, engine: Engine) -> None:
        """Have an engine follow the newest policy again."""
        if self._engines.serves(engine):
            self._pin(engine, is_pinned=False)
            self._order(engine)

    def _pin(self, engine: Engine, *, is_pinned: bool) -> None:
        self._journal.write("pin", engine_id=engine.engine_id, is_pinned=is_pinned)
        self._swaps.pin(engine.engine_id, is_pinned=is_pinned)

    # --- what engines say ---

    def _on_joined(self, engine: Engine) -> None:
        ready = engine.ready
        self._journal.write(
            "joined", engine_id=engine.engine_id, version=ready.version, rollback_epoch=ready.rollback_epoch, running=ready.running
        )
        self._staged.pop(engine.engine_id, None)
        del self._num_unordered[engine.engine_id]
        self._swaps.joined(engine.engine_id, (engine.ready.rollback_epoch, engine.ready.version))
        self._order(engine)
        self._tell_trainer()

    def _on_died(self, engine_id: int) -> None:
        self._journal.write("left", engine_id=engine_id)
        self._swaps.left(engine_id)
        self._tell_trainer()

    def _on_staged(self, peer: str, staged: WeightsStaged) -> None:
        engine = self._heard_of(peer, staged)
        if engine is not None and self._staged.get(engine.engine_id) != (age := (staged.rollback_epoch, staged.version)):
            self._staged[engine.engine_id] = age
            self._journal.write("staged", **msgspec.structs.asdict(staged))

    def _on_committed(self, peer: str, committed: WeightsCommitted) -> None:
        engine = self._heard_of(peer, committed)
        if engine is None:
            return
        if self._swaps.committed(engine.engine_id, (committed.rollback_epoch, committed.version)):
            self._engines.committed(engine, committed.version)
            self._progress.swapped(committed)
            self._journal.write("swap", **msgspec.structs.asdict(committed))
        self._order_ended(engine)

    def _on_refused(self, peer: str, refused: WeightsRefused) -> None:
        engine = self._heard_of(peer, refused)
        if engine is None:
            return
        refused = msgspec.structs.replace(refused, error=shorten(refused.error))
        age, ordered = (refused.rollback_epoch, refused.version), self._swaps[engine.engine_id].ordered
        if ordered is None or ordered > age:
            self._num_unordered[engine.engine_id] += 1
            if self._num_unordered[engine.engine_id] > MAX_UNORDERED:
                words = f"WeightsRefused of version {refused.version}, which it was not told to fetch"
                self._engines.peers.refuse(peer, Violation(kind=Kind.UNASKED, words=words))
                return
        self._journal.write("refused", **msgspec.structs.asdict(refused))
        is_news = self._swaps.refused(engine.engine_id, age, refused.error)
        self._order_ended(engine)
        if is_news:
            error = PeerRefused(f"{peer} {self._swaps[engine.engine_id].fault}")
            self._fence(engine, error)
            if self._is_hopeless() and self._tasks is not None:
                self._tasks.create_task(self._end_unless_refilled(error))

    def _heard_of(self, peer: str, said: WeightsStaged | WeightsCommitted | WeightsRefused) -> Engine | None:
        """Return the engine that speaks of a policy; None while it is lost, or where it was never told of that policy."""
        engine = self._engines.find(said.engine_id)
        return None if engine is None or self._engines.is_refused(engine, said) else engine

    def _order_ended(self, engine: Engine) -> None:
        self._order(engine)
        self._tell_trainer()
        self._engines.changed.set()
        self._credits.set()
