"""Stage 6: brings every published policy to every engine, each on its own schedule, and hands slots back to the trainer."""

from __future__ import annotations

import asyncio

from orchestrator.progress import Progress
from orchestrator.rules.admission import Admission
from orchestrator.rules.swaps import Policy, Swaps
from orchestrator.state.engines import Engine, Engines
from orchestrator.state.peers import Peers
from pipelinerl.errors import PeerError, PeerRefused, PeerSilent
from pipelinerl.messages import PolicyHeld, PolicyPublished, SlotReleased, StageWeights, WeightsCommitted, WeightsRefused, WeightsStaged
from pipelinerl.metrics import Journal
from pipelinerl.stages import Channel, Signal


class Refresh:
    """Tells engines what to fetch and follows each to its commit. An engine that fails or is late is fenced and refilled.

    takes     PolicyPublished, from delivery; WeightsStaged, WeightsCommitted and WeightsRefused, from engines
    gives     StageWeights, to engines; SlotReleased and PolicyHeld, to the trainer; credits, to dispatch
    waits for every open order, each apart, so a slow engine holds up nobody else
    woken by  engines
    fails     PeerSilent or PeerRefused, with the last engine's own words, once every engine is fenced and beyond refilling
    ends      when the run does
    """

    name = "refresh"

    def __init__(
        self,
        *,
        published: Channel[PolicyPublished],
        engines: Engines,
        trainer: Peers,
        admission: Admission,
        credits: Signal,
        progress: Progress,
        journal: Journal,
        commit_deadline_s: float,
    ) -> None:
        self._published = published
        self._engines = engines
        self._trainer = trainer
        self._admission = admission
        self._credits = credits
        self._progress = progress
        self._journal = journal
        self._commit_deadline_s = commit_deadline_s
        self._swaps = Swaps()
        self._held_by_all: int | None = None
        """What the trainer was told last."""
        self._tasks: asyncio.TaskGroup | None = None
        engines.peers.on(WeightsStaged, self._on_staged)
        engines.peers.on(WeightsCommitted, self._on_committed)
        engines.peers.on(WeightsRefused, self._on_refused)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            async for published in self._published:
                self._announce(published)

    def welcome(self, engine: Engine) -> None:
        """Bring an engine whose process is new to the newest policy, if there is one yet."""
        self._swaps.joined(engine.engine_id)
        self._order(engine)
        self._tell_trainer()

    def _announce(self, published: PolicyPublished) -> None:
        policy = Policy(age=(published.lineage, published.version), slot=published.slot, digest=published.digest)
        self._swaps.published(policy)
        self._admission.published(published.version)
        self._credits.set()
        for engine in self._engines:
            self._order(engine)
        self._tell_trainer()

    def _order(self, engine: Engine) -> None:
        """Tell an engine to fetch the newest policy, unless it has an order already."""
        policy = self._swaps.next_order(engine.engine_id)
        if policy is None or self._tasks is None:
            return
        lineage, version = policy.age
        when_idle = self._admission.pace.swaps_when_idle
        self._engines.peers.hub.send(
            engine.peer, StageWeights(version=version, slot=policy.slot, digest=policy.digest, when_idle=when_idle, lineage=lineage)
        )
        self._tasks.create_task(self._wait_for_commit(engine, policy))

    async def _wait_for_commit(self, engine: Engine, policy: Policy) -> None:
        swap = self._swaps[engine.engine_id]
        try:
            async with asyncio.timeout(self._commit_deadline_s):
                while swap.ordered == policy.age:
                    await self._engines.changed.wait()
        except TimeoutError:
            reason = (
                f"waited {self._commit_deadline_s:g} s for {engine.peer} (at version {engine.version}) to commit policy {policy.age[1]}"
            )
            if self._swaps.late(engine.engine_id, policy.age, reason):
                self._fence(engine, PeerSilent(reason))

    def _fence(self, engine: Engine, error: PeerError) -> None:
        """Give an engine no new work; raise its error where every engine is fenced and no refill is under way."""
        engine.fault = str(error)
        self._journal.write("fence", engine_id=engine.engine_id, version=engine.version, error=engine.fault)
        self._engines.changed.set()
        self._credits.set()
        if all(self._swaps[engine.engine_id].is_hopeless for engine in self._engines):
            raise error

    def _on_staged(self, peer: str, staged: WeightsStaged) -> None:
        self._journal.write("staged", **{field: getattr(staged, field) for field in staged.__struct_fields__})

    def _on_committed(self, peer: str, committed: WeightsCommitted) -> None:
        engine = self._engines[committed.engine_id]
        if self._swaps.committed(engine.engine_id, (committed.lineage, committed.version)):
            engine.version, engine.fault = committed.version, ""
            self._progress.swapped(committed)
            self._journal.write("swap", **{field: getattr(committed, field) for field in committed.__struct_fields__})
        self._order_ended(engine)

    def _on_refused(self, peer: str, refused: WeightsRefused) -> None:
        engine = self._engines[refused.engine_id]
        is_news = self._swaps.refused(engine.engine_id, (refused.lineage, refused.version), refused.error)
        self._order_ended(engine)
        if is_news:
            self._fence(engine, PeerRefused(f"{peer} {self._swaps[engine.engine_id].fault}"))

    def _order_ended(self, engine: Engine) -> None:
        self._order(engine)
        self._tell_trainer()
        self._engines.changed.set()
        self._credits.set()

    def _tell_trainer(self) -> None:
        for slot in self._swaps.take_free_slots():
            self._trainer.hub.send("trainer-0", SlotReleased(slot=slot))
        held = self._swaps.held_by_all()
        if held != self._held_by_all:
            self._held_by_all = held
            self._trainer.hub.send("trainer-0", PolicyHeld(version=held))
