"""The scorers as the orchestrator knows them: how much each takes at once, and who waits for which score."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from orchestrator.state.peers import Peers
from pipelinerl.messages import GroupScored, Replied, Reply, Score, Scored, ScoreGroup, ScorerLoad, ScorerReady
from pipelinerl.stages import Signal
from pipelinerl.watch import Watch

Sink = Callable[[Scored], None]
GroupSink = Callable[[GroupScored], None]
ReplySink = Callable[[Replied], None]
Lost = Callable[[int], None]
"""Is told that the scorer of this id will not answer."""

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request that a scorer has."""

    scorer: Scorer
    attempt: int
    sink: Callable[[Any], None]
    lost: Lost


class Scorers:
    """Sends trajectories to the scorer with the most room, and hands each score to whoever asked, once.

    A scorer is lost when another process announces itself under its name: every request it had is then given back to whoever asked.
    """

    def __init__(self, peers: Peers, *, expected: int, watch: Watch) -> None:
        self.peers = peers
        self.changed = Signal()
        """Set when a scorer announces itself or answers: there may be room."""
        self.num_fenced = 0
        self._expected = expected
        self._watch = watch
        self._scorers: dict[int, Scorer] = {}
        self._asked: dict[str, _Asked] = {}
        self._died: list[Callable[[int], None]] = []
        watch.explain(self._owed)
        peers.on(ScorerReady, self._on_ready)
        peers.on(ScorerLoad, self._on_load)
        peers.on(Scored, self._on_scored)
        peers.on(GroupScored, self._on_scored)
        peers.on(Replied, self._on_scored)

    def __iter__(self):
        return iter(self._scorers.values())

    async def wait_until_ready(self) -> None:
        """Wait until every scorer of the config has announced itself."""
        while len(self._scorers) < self._expected:
            await self.changed.wait()

    def on_died(self, handler: Callable[[int], None]) -> None:
        """Have `handler` called with the id of every scorer that is lost, after its requests were given back."""
        self._died.append(handler)

    @property
    def has_room(self) -> bool:
        """True where some scorer takes another trajectory."""
        return any(scorer.room > 0 for scorer in self._reachable())

    def ask(self, request: Score, *, sink: Sink, lost: Lost) -> None:
        """Send a trajectory to the scorer with the most room (`has_room`); `sink` is called once with the score, or `lost` once."""
        self._ask(request, sink, lost)

    def ask_group(self, request: ScoreGroup, *, sink: GroupSink, lost: Lost) -> None:
        """As `ask`, for siblings to compare."""
        self._ask(request, sink, lost)

    def ask_reply(self, request: Reply, *, sink: ReplySink, lost: Lost) -> None:
        """As `ask`, for an environment to reply."""
        self._ask(request, sink, lost)

    def _ask(self, request: Reply | Score | ScoreGroup, sink: Callable[[Any], None], lost: Lost) -> None:
        scorer = max(self._reachable(), key=lambda candidate: candidate.room)
        if not self.peers.send(scorer.peer, request):
            lost(scorer.ready.scorer_id)
            return
        scorer.num_outstanding += 1
        self._asked[request.rollout_id] = _Asked(scorer=scorer, attempt=request.attempt, sink=sink, lost=lost)

    def _reachable(self) -> list[Scorer]:
        return [scorer for scorer in self if self.peers.is_reachable(scorer.peer)]

    def _owed(self) -> str | None:
        """What scorers were asked for and have not answered: for the verdict on a stall."""
        for rollout_id, asked in self._asked.items():
            return (
                f"scorers owe {len(self._asked)} scores, the first of rollout {rollout_id}, attempt {asked.attempt}, of {asked.scorer.peer}"
            )
        return None

    def _on_ready(self, peer: str, ready: ScorerReady) -> None:
        known = self._scorers.get(ready.scorer_id)
        if known is not None and known.ready.process_id == ready.process_id:
            return
        self._scorers[ready.scorer_id] = Scorer(peer=peer, ready=ready)
        if known is not None:
            self._lose(known)
        self.changed.set()

    def _lose(self, scorer: Scorer) -> None:
        asked = {rollout_id: one for rollout_id, one in self._asked.items() if one.scorer is scorer}
        for rollout_id, one in asked.items():
            del self._asked[rollout_id]
            one.lost(scorer.ready.scorer_id)
        for handler in self._died:
            handler(scorer.ready.scorer_id)

    def _on_load(self, peer: str, load: ScorerLoad) -> None:
        scorer = self._scorers.get(load.scorer_id)
        if scorer is not None:
            scorer.load = load
        self.changed.set()  # a scorer that could not be reached is there again

    def _on_scored(self, peer: str, scored: Scored | GroupScored | Replied) -> None:
        asked = self._asked.get(scored.rollout_id)
        if asked is None or asked.attempt != scored.attempt:
            self.num_fenced += 1
            return
        del self._asked[scored.rollout_id]
        asked.scorer.num_outstanding -= 1
        self._watch.moved()
        self.changed.set()
        asked.sink(scored)
