"""The scorers as the orchestrator knows them: how much each takes at once, and who waits for which score."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec

from orchestrator.peers.peers import Peers
from orchestrator.rules.fenced import FencedRequests
from orchestrator.rules.validation.announcements import AnnouncementCheck, gauges
from orchestrator.rules.validation.scores import ScoreCheck
from orchestrator.rules.validation.violations import MAX_WORDS, Kind, Violation, number_of, shorten
from pipelinerl.messages import GroupScored, Replied, Reply, Score, Scored, ScoreGroup, ScorerLoad, ScorerReady, Unread
from pipelinerl.runtime.stage import Signal
from pipelinerl.runtime.watch import Watch

Sink = Callable[[Scored], None]
GroupSink = Callable[[GroupScored], None]
ReplySink = Callable[[Replied], None]
Lost = Callable[[int], None]
"""Is told that the scorer of this id will not answer."""
Refused = Callable[[Violation], None]
"""Is told what cannot be about the scorer's answer."""

CALLS_PER_SLOT = 32
"""Scores asked of a scorer for each of its slots: enough to hide the connection's latency behind fast rewards; more only queues there."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Scorer:
    """One scorer that has announced itself."""

    peer: str
    ready: ScorerReady
    num_outstanding: int = 0
    is_condemned: bool = False
    """It keeps saying what cannot be, or that it has failed: its process is being replaced, and gets no work until then."""
    load: ScorerLoad | None = None

    @property
    def room(self) -> int:
        """Scores it may still be asked for."""
        return 0 if self.is_condemned else self.ready.num_slots * CALLS_PER_SLOT - self.num_outstanding


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request that a scorer has."""

    scorer: Scorer
    request: Reply | Score | ScoreGroup
    sink: Callable[[Any], None]
    lost: Lost
    refused: Refused

    def is_answered_by(self, peer: str, attempt: int) -> bool:
        """True for an answer of the scorer that was asked, to this very attempt."""
        return (self.scorer.peer, self.request.attempt) == (peer, attempt)


class Scorers:
    """Sends trajectories to the scorer with the most room, and hands each score to whoever asked, once.

    A scorer is lost when another process announces itself under its name: every request it had is then given back to whoever asked. An
    answer is taken only from the scorer that was asked, and only where it can be true (`rules.validation.scores`).
    """

    def __init__(
        self,
        peers: Peers,
        *,
        expected: int,
        watch: Watch,
        score_check: ScoreCheck | None = None,
        announcement_check: AnnouncementCheck | None = None,
    ) -> None:
        """`judged` and `announced` say what cannot be about answers and announcements; without them all is believed but who speaks."""
        self.peers = peers
        self._score_check = score_check
        self._announcement_check = announcement_check
        self.changed = Signal()
        """Set when a scorer announces itself or answers: there may be room."""
        self.num_fenced = 0
        self._expected = expected
        self._watch = watch
        self._scorers: dict[int, Scorer] = {}
        self._asked: dict[str, _Asked] = {}
        self._fenced: dict[str, FencedRequests] = collections.defaultdict(FencedRequests)
        """By peer, of all its processes."""
        self._not_taken: dict[str, Violation] = {}
        """What cannot be about the announcement of a peer, by its name."""
        self._died: list[Callable[[int, bool], None]] = []
        watch.explain(self._owed)
        peers.on(ScorerReady, self._on_ready)
        peers.on(ScorerLoad, self._on_load)
        peers.on(Scored, self._on_scored)
        peers.on(GroupScored, self._on_scored)
        peers.on(Replied, self._on_scored)
        peers.on(Unread, self._on_unread)
        peers.on_condemned(self._on_condemned)

    def __iter__(self):
        return iter(self._scorers.values())

    async def wait_until_ready(self) -> None:
        """Wait until every scorer of the config has announced itself."""
        while len(self._scorers) < self._expected:
            await self.changed.wait()

    def on_died(self, handler: Callable[[int, bool], None]) -> None:
        """Have `handler` called with the id of every scorer that is lost, after its requests were given back, and with True where it went
        for what it said: then nothing that it was asked is to blame."""
        self._died.append(handler)

    @property
    def has_room(self) -> bool:
        """True where some scorer takes another trajectory."""
        return any(scorer.room > 0 for scorer in self._reachable())

    def ask(self, request: Score, *, sink: Sink, lost: Lost, refused: Refused | None = None) -> None:
        """Send a trajectory to the scorer with the most room (`has_room`); `sink` is called once with the score, or `lost` once, or
        `refused` once, where the score cannot be; by default that is `lost`, too."""
        self._ask(request, sink, lost, refused)

    def ask_group(self, request: ScoreGroup, *, sink: GroupSink, lost: Lost, refused: Refused | None = None) -> None:
        """As `ask`, for siblings to compare."""
        self._ask(request, sink, lost, refused)

    def ask_reply(self, request: Reply, *, sink: ReplySink, lost: Lost, refused: Refused | None = None) -> None:
        """As `ask`, for an environment to reply."""
        self._ask(request, sink, lost, refused)

    def _ask(self, request: Reply | Score | ScoreGroup, sink: Callable[[Any], None], lost: Lost, refused: Refused | None) -> None:
        scorer = max(self._reachable(), key=lambda candidate: candidate.room)
        scorer_id = scorer.ready.scorer_id
        if not self.peers.send(scorer.peer, request):
            self._fenced[scorer.peer].add((request.rollout_id, request.attempt))  # it may come through all the same
            lost(scorer_id)
            return
        scorer.num_outstanding += 1
        self._asked[request.rollout_id] = _Asked(
            scorer=scorer, request=request, sink=sink, lost=lost, refused=refused or (lambda violation: lost(scorer_id))
        )

    def _reachable(self) -> list[Scorer]:
        return [scorer for scorer in self if self.peers.is_reachable(scorer.peer)]

    def _owed(self) -> str | None:
        """What scorers were asked for and have not answered: for the verdict on a stall."""
        for rollout_id, asked in self._asked.items():
            return (
                f"scorers owe {len(self._asked)} scores, the first of rollout {rollout_id}, attempt {asked.request.attempt}, of"
                f" {asked.scorer.peer}"
            )
        return None

    def _on_ready(self, peer: str, ready: ScorerReady) -> None:
        known = self._scorers.get(ready.scorer_id)
        if known is not None and known.ready.process_id == ready.process_id:
            return
        if (violation := self._wrong(peer, ready)) is not None:
            self._not_taken[peer] = violation
            self.peers.refuse(peer, violation)
            return
        self._not_taken.pop(peer, None)
        self._scorers[ready.scorer_id] = Scorer(peer=peer, ready=ready)
        if known is not None:
            self._lose(known)
        self.changed.set()

    def _wrong(self, peer: str, ready: ScorerReady) -> Violation | None:
        if number_of(peer) >= self._expected:
            return Violation(
                kind=Kind.IDENTITY, words=f"ScorerReady of {peer}, expected one of the first {self._expected}, which run rewards"
            )
        return None if self._announcement_check is None else self._announcement_check.scorer(ready)

    def _on_condemned(self, peer: str, is_banned: bool) -> None:
        """A scorer that keeps lying, or says that it has failed, gets no more work; what it has is asked again once another is there."""
        for scorer in self._scorers.values():
            scorer.is_condemned |= scorer.peer == peer

    def _lose(self, scorer: Scorer) -> None:
        asked = {rollout_id: one for rollout_id, one in self._asked.items() if one.scorer is scorer}
        for rollout_id, one in asked.items():
            del self._asked[rollout_id]
            self._fenced[scorer.peer].add((rollout_id, one.request.attempt))
            one.lost(scorer.ready.scorer_id)
        for handler in self._died:
            handler(scorer.ready.scorer_id, scorer.is_condemned)

    def _on_load(self, peer: str, load: ScorerLoad) -> None:
        if (violation := gauges(load)) is not None:
            self.peers.refuse(peer, violation)
            return
        scorer = self._scorers.get(load.scorer_id)
        if scorer is not None:
            scorer.load = load
        elif peer in self._not_taken:  # it announces itself but once: as it is, it would be waited for without end
            self.peers.refuse(peer, self._not_taken[peer])
        self.changed.set()  # a scorer that could not be reached is there again

    def _on_scored(self, peer: str, scored: Scored | GroupScored | Replied) -> None:
        asked = self._asked.get(scored.rollout_id)
        if asked is None or not asked.is_answered_by(peer, scored.attempt):
            self._not_asked(peer, scored)
            return
        if self._score_check is not None and (violation := self._score_check.answer(scored, asked.request)) is not None:
            self._end(asked)
            asked.refused(violation)
            self.peers.refuse(peer, violation)
            return
        self._end(asked)
        self._watch.moved()
        if len(scored.error) > MAX_WORDS:
            scored = msgspec.structs.replace(scored, error=shorten(scored.error))
        asked.sink(scored)

    def _on_unread(self, peer: str, unread: Unread) -> None:
        """An answer that cannot even be read is none: it is asked for again."""
        asked = self._asked.get(unread.rollout_id)
        if asked is not None and asked.is_answered_by(peer, unread.attempt):
            self._end(asked)
            asked.refused(Violation(kind=unread.reason, words=unread.words))

    def _end(self, asked: _Asked) -> None:
        del self._asked[asked.request.rollout_id]
        self._fenced[asked.scorer.peer].add((asked.request.rollout_id, asked.request.attempt))
        asked.scorer.num_outstanding -= 1
        self.changed.set()

    def _not_asked(self, peer: str, scored: Scored | GroupScored | Replied) -> None:
        if (scored.rollout_id, scored.attempt) in self._fenced[peer]:
            self.num_fenced += 1
            return
        words = f"{type(scored).__name__} of {scored.rollout_id[:100]}, attempt {scored.attempt}, of {peer}, which was not asked for it"
        self.peers.refuse(peer, Violation(kind=Kind.UNASKED, words=words))
