"""The scorers as the orchestrator knows them: how much each takes at once, and who waits for which score."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from orchestrator.state.peers import Peers
from pipelinerl.messages import GroupScored, Score, Scored, ScoreGroup, ScorerLoad, ScorerReady
from pipelinerl.stages import Signal
from pipelinerl.watch import Watch

Sink = Callable[[Scored], None]
GroupSink = Callable[[GroupScored], None]

CALLS_PER_SLOT = 32
"""Scores asked of a scorer for each of its slots: enough to hide the connection's latency behind fast rewards; more only queues there."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Scorer:
    """One scorer that has announced itself."""

    peer: str
    ready: ScorerReady
    num_outstanding: int = 0
    load: ScorerLoad | None = None

    @property
    def room(self) -> int:
        """Scores it may still be asked for."""
        return self.ready.num_slots * CALLS_PER_SLOT - self.num_outstanding


class Scorers:
    """Sends trajectories to the scorer with the most room, and hands each score to whoever asked, once."""

    def __init__(self, peers: Peers, *, expected: int, watch: Watch) -> None:
        self.peers = peers
        self.changed = Signal()
        """Set when a scorer announces itself or answers: there may be room."""
        self.num_fenced = 0
        self._expected = expected
        self._watch = watch
        self._scorers: dict[int, Scorer] = {}
        self._asked: dict[str, tuple[Scorer, int, Callable[[Any], None]]] = {}
        peers.on(ScorerReady, self._on_ready)
        peers.on(ScorerLoad, self._on_load)
        peers.on(Scored, self._on_scored)
        peers.on(GroupScored, self._on_scored)

    def __iter__(self):
        return iter(self._scorers.values())

    async def wait_until_ready(self) -> None:
        """Wait until every scorer of the config has announced itself."""
        while len(self._scorers) < self._expected:
            await self.changed.wait()

    @property
    def has_room(self) -> bool:
        """True where some scorer takes another trajectory."""
        return any(scorer.room > 0 for scorer in self)

    def ask(self, request: Score, sink: Sink) -> None:
        """Send a trajectory to the scorer with the most room; `sink` is called once with the score. Needs `has_room`."""
        self._ask(request, sink)

    def ask_group(self, request: ScoreGroup, sink: GroupSink) -> None:
        """As `ask`, for siblings to compare."""
        self._ask(request, sink)

    def _ask(self, request: Score | ScoreGroup, sink: Callable[[Any], None]) -> None:
        scorer = max(self, key=lambda candidate: candidate.room)
        scorer.num_outstanding += 1
        self._asked[request.rollout_id] = (scorer, request.attempt, sink)
        self.peers.hub.send(scorer.peer, request)

    def _on_ready(self, peer: str, ready: ScorerReady) -> None:
        self._scorers[ready.scorer_id] = Scorer(peer=peer, ready=ready)
        self.changed.set()

    def _on_load(self, peer: str, load: ScorerLoad) -> None:
        self._scorers[load.scorer_id].load = load

    def _on_scored(self, peer: str, scored: Scored | GroupScored) -> None:
        asked = self._asked.get(scored.rollout_id)
        if asked is None or asked[1] != scored.attempt:
            self.num_fenced += 1
            return
        del self._asked[scored.rollout_id]
        scorer, _, sink = asked
        scorer.num_outstanding -= 1
        self._watch.moved()
        self.changed.set()
        sink(scored)
