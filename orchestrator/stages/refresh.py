"""Stage 6: brings every published policy to every engine, each on its own schedule, and hands buffers back to the trainer."""

from __future__ import annotations

import asyncio

from orchestrator.progress import Progress
from orchestrator.rules.admission import Admission
from orchestrator.state.engines import Engines
from orchestrator.state.peers import Peers
from pipelinerl.errors import PeerRefused, PeerSilent
from pipelinerl.messages import PolicyPublished, SlotReleased, StageWeights, WeightsCommitted, WeightsRefused
from pipelinerl.metrics import Journal
from pipelinerl.stages import Channel, Signal


class Refresh:
    """Announces policies to engines and follows their commits.

    takes     PolicyPublished, from delivery; WeightsCommitted and WeightsRefused, from engines
    gives     StageWeights, to engines; SlotReleased, to the trainer; credits, to dispatch
    waits for every engine to commit, for each version apart, so a slow engine holds up nobody else
    woken by  engines
    fails     PeerSilent, where an engine does not commit in time; PeerRefused, with its words, where it refuses
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
        self._slots: dict[int, str] = {}
        """Buffer of each version that an engine may still read."""
        engines.peers.on(WeightsCommitted, self._on_committed)
        engines.peers.on(WeightsRefused, self._on_refused)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            async for published in self._published:
                self._announce(published)
                group.create_task(self._wait_for_commits(published.version))

    def _announce(self, published: PolicyPublished) -> None:
        self._slots[published.version] = published.slot
        self._admission.published(published.version)
        self._credits.set()
        for engine in self._engines:
            self._engines.peers.hub.send(
                engine.peer,
                StageWeights(
                    version=published.version,
                    slot=published.slot,
                    digest=published.digest,
                    when_idle=self._admission.pace.swaps_when_idle,
                ),
            )

    async def _wait_for_commits(self, version: int) -> None:
        try:
            async with asyncio.timeout(self._commit_deadline_s):
                while not self._engines.all_hold(version):
                    await self._engines.changed.wait()
        except TimeoutError:
            late = ", ".join(f"{engine.peer} (at version {engine.version})" for engine in self._engines if engine.version < version)
            raise PeerSilent(f"waited {self._commit_deadline_s:g} s for {late} to commit policy {version}") from None

    def _on_committed(self, peer: str, committed: WeightsCommitted) -> None:
        engine = self._engines[committed.engine_id]
        self._engines.committed(engine, committed.version)
        self._progress.swapped(committed)
        self._journal.write("swap", **{field: getattr(committed, field) for field in committed.__struct_fields__})
        self._release_slots()
        self._engines.changed.set()
        self._credits.set()

    def _release_slots(self) -> None:
        """Hand back every buffer that all engines have moved past: none of them reads it any more."""
        oldest = self._engines.oldest_version()
        for version in [version for version in self._slots if version < oldest]:
            self._trainer.hub.send("trainer-0", SlotReleased(slot=self._slots.pop(version)))

    def _on_refused(self, peer: str, refused: WeightsRefused) -> None:
        raise PeerRefused(f"{peer} refused policy {refused.version}: {refused.error}")
