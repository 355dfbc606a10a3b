"""Stage 6: every published policy is brought to every engine, each on its own schedule, and buffers are handed back to the trainer."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import msgspec

from orchestrator.observe.progress import Progress
from orchestrator.peers.engines import Engine, Engines
from orchestrator.peers.peers import Peers
from orchestrator.rules.admission import Admission
from orchestrator.rules.kv import KvPolicy
from orchestrator.rules.swaps import Policy, Swaps
from orchestrator.rules.validation.violations import Kind, Violation, shorten
from orchestrator.stages.alternation import Alternation
from orchestrator.stages.policy_news import PolicyNews
from pipelinerl.errors import PeerError, PeerRefused, PeerSilent
from pipelinerl.messages import (
    LayoutFixed,
    PolicyPublished,
    StageWeights,
    TrainerReady,
    WeightsCommitted,
    WeightsRefused,
    WeightsStaged,
)
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.stage import Channel, Signal


@dataclasses.dataclass(slots=True, kw_only=True)
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
    ends      cancelled, when the run ends
    """

    name = "weight_sync"
    published: Channel[TrainerReady | PolicyPublished]
    engines: Engines
    trainer: Peers
    admission: Admission
    credits: Signal
    progress: Progress
    journal: Journal
    layout_for: Callable[[TrainerReady], LayoutFixed]
    """The callback says what a trainer that starts must know to publish."""
    commit_deadline_s: float
    kv_policy: KvPolicy = dataclasses.field(default_factory=KvPolicy)
    """The limits on how far KV caches may lag; by default there are none."""
    alternation: Alternation = dataclasses.field(default_factory=Alternation)
    """The phases of engines and trainer: while it trains on their devices, no engine is told of a policy."""
    _swaps: Swaps = dataclasses.field(init=False)
    _news: PolicyNews = dataclasses.field(init=False)
    _tasks: asyncio.TaskGroup | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        self._swaps = Swaps(reads_copies=self.alternation.is_beside)
        self._news = PolicyNews(trainer=self.trainer, swaps=self._swaps)
        self.alternation.swaps, self.alternation.begin_generation = self._swaps, self._order_all
        self.engines.on_policy(WeightsStaged, self._on_staged)
        self.engines.on_policy(WeightsCommitted, self._on_committed)
        self.engines.on_policy(WeightsRefused, self._on_refused)
        self.engines.on_joined(self._on_joined)
        self.engines.on_died(self._on_died)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            telling = self._tasks.create_task(self._news.run())
            self.alternation.begin()
            async for news in self.published:
                if isinstance(news, TrainerReady):
                    self._welcome(news)
                else:
                    self._announce(news)
            telling.cancel()

    # --- the trainer ---

    def _welcome(self, ready: TrainerReady) -> None:
        """Tell a trainer that starts the layout to publish in; the buffers of the one before are gone."""
        self.journal.write("trainer", version=ready.version)
        self._swaps.forget_buffers()
        self.alternation.update()
        self._news.forget()
        self.engines.unfence()  # what they refused may be what the dying trainer left
        self.trainer.send("trainer-0", msgspec.structs.replace(self.layout_for(ready), rollback_epoch=self._swaps.rollback_epoch))

    def _announce(self, published: PolicyPublished) -> None:
        self.journal.write("policy", **msgspec.structs.asdict(published))
        age = (published.rollback_epoch, published.version)
        policy = Policy(age=age, buffer=published.buffer, digest=published.digest, copy=published.copy)
        self._swaps.published(policy)
        self.admission.published(published.version)
        self.credits.set()
        self.alternation.update()
        self._order_all()
        self._news.note()

    # --- one engine ---

    def _order_all(self) -> None:
        for engine in self.engines:
            self._order(engine)

    def _order(self, engine: Engine) -> None:
        """Tell an engine to fetch the newest policy, unless it has an order already, or the trainer has its devices."""
        policy = self._swaps.next_order(engine.engine_id) if self.alternation.may_order(engine.engine_id) else None
        if policy is None or self._tasks is None:
            return
        rollback_epoch, version = policy.age
        order = StageWeights(
            version=version,
            buffer=self._swaps.buffer_of(policy, engine.engine_id),
            digest=policy.digest,
            when_idle=self.admission.schedule.swaps_when_idle,
            rollback_epoch=rollback_epoch,
            kv_max_staleness=self.kv_policy.max_staleness,
            kv_max_mean_staleness=self.kv_policy.max_mean_staleness,
        )
        engine.ordered(version=version, rollback_epoch=rollback_epoch)
        self.alternation.ordered(engine)
        if self.engines.peers.send(engine.peer, order):
            self._tasks.create_task(self._wait_for_commit(engine, policy))
        else:
            self._swaps.not_sent(engine.engine_id)

    async def _wait_for_commit(self, engine: Engine, policy: Policy) -> None:
        try:
            async with asyncio.timeout(self.commit_deadline_s):
                while self.engines.serves(engine) and self._swaps[engine.engine_id].ordered == policy.age:
                    await self.engines.changed.wait()
        except TimeoutError:
            reason = f"waited {self.commit_deadline_s:g} s for {engine.peer} (at version {engine.version}) to commit policy {policy.age[1]}"
            if self._swaps.late(engine.engine_id, policy.age, reason):
                error = PeerSilent(reason)
                self._fence(engine, error)
                if self._is_hopeless():
                    raise error from None

    def _fence(self, engine: Engine, error: PeerError) -> None:
        """Give an engine no new work."""
        self.engines.fence(engine, str(error))
        self.journal.write("fence", engine_id=engine.engine_id, version=engine.version, error=engine.fault)
        self.credits.set()

    def _is_hopeless(self) -> bool:
        """Return whether every engine is fenced, and no refill is under way."""
        return not self.engines.num_missing and all(
            engine.is_rejected or self._swaps[engine.engine_id].is_hopeless for engine in self.engines
        )

    async def _end_unless_refilled(self, error: PeerError) -> None:
        """End the run with `error` unless an engine is refilled in time.

        Engines may have refused what a dying trainer left, so the trainer that follows gets time to publish. The wait is half the deadline:
        at the whole of it the watchdog ends the run, without the engines' words.
        """
        try:
            async with asyncio.timeout(self.commit_deadline_s / 2):
                while self._is_hopeless():
                    await self.engines.changed.wait()
        except TimeoutError:
            raise error from None

    # --- for evaluations ---

    def pin(self, engine: Engine, *, is_pinned: bool) -> None:
        """Have an engine keep its version, once it has ended the swap that is under way, or follow the newest policy again."""
        if is_pinned or self.engines.serves(engine):
            self.journal.write("pin", engine_id=engine.engine_id, is_pinned=is_pinned)
            self._swaps.pin(engine.engine_id, is_pinned=is_pinned)
            self.alternation.update()
            self._order(engine)

    def is_settled(self, engine: Engine) -> bool:
        """Return whether an engine has no swap under way, and neither sleeps nor is about to."""
        return self._swaps[engine.engine_id].ordered is None and self.alternation.is_awake(engine)

    # --- what engines say ---

    def _on_joined(self, engine: Engine) -> None:
        ready = engine.ready
        self.journal.write(
            "joined", engine_id=engine.engine_id, version=ready.version, rollback_epoch=ready.rollback_epoch, running=ready.running
        )
        self._swaps.joined(engine.engine_id, (ready.rollback_epoch, ready.version))
        self._order(engine)
        self._news.note()

    def _on_died(self, engine_id: int) -> None:
        self.journal.write("left", engine_id=engine_id)
        self._swaps.left(engine_id)
        self._news.note()

    def _on_staged(self, engine: Engine, staged: WeightsStaged) -> None:
        if self._swaps.staged(engine.engine_id, (staged.rollback_epoch, staged.version)):
            self.journal.write("staged", **msgspec.structs.asdict(staged))

    def _on_committed(self, engine: Engine, committed: WeightsCommitted) -> None:
        if self._swaps.committed(engine.engine_id, (committed.rollback_epoch, committed.version)):
            self.engines.committed(engine, committed.version)
            self.alternation.committed(engine)
            self.progress.swapped(committed)
            self.journal.write("swap", **msgspec.structs.asdict(committed))
        self._order_ended(engine)

    def _on_refused(self, engine: Engine, refused: WeightsRefused) -> None:
        refused = msgspec.structs.replace(refused, error=shorten(refused.error))
        age = (refused.rollback_epoch, refused.version)
        if not self._swaps.may_refuse(engine.engine_id, age):
            words = f"WeightsRefused of version {refused.version}, which it was not told to fetch"
            self.engines.peers.refuse(engine.peer, Violation(kind=Kind.UNASKED, words=words))
            return
        self.journal.write("refused", **msgspec.structs.asdict(refused))
        is_news = self._swaps.refused(engine.engine_id, age, refused.error)
        self._order_ended(engine)
        if is_news:
            error = PeerRefused(f"{engine.peer} {self._swaps[engine.engine_id].fault}")
            self._fence(engine, error)
            if self._is_hopeless() and self._tasks is not None:
                self._tasks.create_task(self._end_unless_refilled(error))

    def _order_ended(self, engine: Engine) -> None:
        self._order(engine)
        self._news.note()
        self.engines.changed.set()
        self.credits.set()
