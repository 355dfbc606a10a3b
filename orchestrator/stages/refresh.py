"""Stage 6: brings every published policy to every engine, each on its own schedule, and hands buffers back to the trainer."""

from __future__ import annotations

import asyncio

from orchestrator.progress import Progress
from orchestrator.rules.admission import Admission
from orchestrator.state.engines import Engine, Engines
from orchestrator.state.peers import Peers
from pipelinerl.errors import PeerRefused, PeerSilent
from pipelinerl.messages import LayoutFixed, PolicyPublished, SlotReleased, StageWeights, TrainerReady, WeightsCommitted, WeightsRefused
from pipelinerl.metrics import Journal
from pipelinerl.stages import Channel, Signal


class Refresh:
    """Announces policies to engines and follows their commits.

    The newest policy's buffer is never handed back, so an engine that joins late can always be brought to it. Buffers die with the trainer
    that made them: one that starts again publishes anew, and whatever engines were told to stage before is forgotten.

    takes     TrainerReady and PolicyPublished, from delivery; WeightsCommitted and WeightsRefused, from engines; engines that join
    gives     StageWeights, to engines; LayoutFixed and SlotReleased, to the trainer; credits, to dispatch
    waits for every engine to commit, for each order apart, so a slow engine holds up nobody else
    woken by  engines
    fails     PeerSilent, where an engine does not commit in time; PeerRefused, with its words, where it refused
    ends      when the run does
    """

    name = "refresh"

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
        self._policies: dict[int, PolicyPublished] = {}
        """By version: what lies in a buffer of the present trainer that an engine may still read, and the newest in any case."""
        self._newest: PolicyPublished | None = None
        self._refusals: dict[tuple[str, int], str] = {}
        """By engine and version: why it was not taken."""
        self._orders: Channel[tuple[Engine, int]] = Channel("orders", giver=self.name, taker=self.name, watch=engines.watch, bound_bytes=1)
        engines.peers.on(WeightsCommitted, self._on_committed)
        engines.peers.on(WeightsRefused, self._on_refused)
        engines.on_joined(self._on_joined)
        engines.on_died(lambda engine_id: self._release())

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_orders(group))
            async for news in self._published:
                if isinstance(news, TrainerReady):
                    self._welcome()
                else:
                    self._announce(news)

    def _welcome(self) -> None:
        """Tell a trainer that starts the layout to publish in; the buffers of the one before are gone."""
        self._policies.clear()
        self._newest = None
        self._trainer.send("trainer-0", LayoutFixed(tensors=self._engines.layout()))

    def _announce(self, published: PolicyPublished) -> None:
        self._policies[published.version] = self._newest = published
        self._admission.published(published.version)
        self._credits.set()
        for engine in self._engines:
            self._order(engine, published)
        self._release()

    def _on_joined(self, engine: Engine) -> None:
        if self._newest is not None:
            self._order(engine, self._newest)

    def _order(self, engine: Engine, published: PolicyPublished) -> None:
        """Have an engine take a policy, unless it holds it or a later one: then a trainer that started again has made it once more."""
        if engine.version >= published.version:
            return
        when_idle = self._admission.pace.swaps_when_idle
        order = StageWeights(version=published.version, slot=published.slot, digest=published.digest, when_idle=when_idle)
        if self._engines.peers.send(engine.peer, order):
            self._orders.put_now((engine, published.version))  # bounded: one for each engine and each of the trainer's few buffers

    async def _follow_orders(self, group: asyncio.TaskGroup) -> None:
        async for engine, version in self._orders:
            group.create_task(self._wait_for_commit(engine, version))

    async def _wait_for_commit(self, engine: Engine, version: int) -> None:
        try:
            async with asyncio.timeout(self._commit_deadline_s):
                while engine.version < version and self._is_owed(engine, version):
                    await self._engines.changed.wait()
        except TimeoutError:
            if not self._is_owed(engine, version):  # nobody said so meanwhile
                return
            if refusal := self._refusals.get((engine.peer, version)):
                raise PeerRefused(f"{engine.peer} refused policy {version}: {refusal}") from None
            late = f"{engine.peer} (at version {engine.version})"
            raise PeerSilent(f"waited {self._commit_deadline_s:g} s for {late} to commit policy {version}") from None

    def _is_owed(self, engine: Engine, version: int) -> bool:
        """True while both the engine and the trainer that made the policy live."""
        return self._engines.serves(engine) and version in self._policies

    def _on_committed(self, peer: str, committed: WeightsCommitted) -> None:
        engine = self._engines.find(committed.engine_id)
        if engine is None:
            return
        engine.version = max(engine.version, committed.version)
        self._progress.swapped(committed)
        self._journal.write("swap", **{field: getattr(committed, field) for field in committed.__struct_fields__})
        self._release()
        self._engines.changed.set()
        self._credits.set()

    def _release(self) -> None:
        """Hand back every buffer but the newest that all engines have moved past: none of them reads it any more."""
        oldest = min((engine.version for engine in self._engines), default=0)
        for version in [version for version in self._policies if version < oldest and self._policies[version] is not self._newest]:
            self._trainer.send("trainer-0", SlotReleased(slot=self._policies.pop(version).slot))

    def _on_refused(self, peer: str, refused: WeightsRefused) -> None:
        """No fault yet: its trainer may be the one that died, and a later policy may be taken. The deadline of the order decides."""
        self._refusals[peer, refused.version] = refused.error
