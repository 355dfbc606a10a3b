"""The scorers as the orchestrator knows them: how much each takes at once, and which task waits for which answer."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator

import msgspec

from orchestrator.ledger.ledger import Ledger
from orchestrator.peers.peers import Peers
from orchestrator.rules.fenced import FencedRequests
from orchestrator.rules.quarantine import Quarantine, row_of
from orchestrator.rules.validation.announcements import AnnouncementCheck, gauges
from orchestrator.rules.validation.scores import ScoreCheck
from orchestrator.rules.validation.violations import MAX_WORDS, Kind, Violation, number_of, shorten
from pipelinerl.messages import CancelRequest, EndEpisode, Outcome, Request, Result, ScorerLoad, ScorerReady, ScorerTask, Unread
from pipelinerl.runtime.stage import Signal
from pipelinerl.runtime.watch import Watch

CALLS_PER_SLOT = 32
"""Requests to a scorer for each of its slots: enough to hide the connection's latency behind fast rewards; a larger value only queues
there.
"""
MAX_REFUSED = 3
"""Impossible answers to one task before it fails. 1 would fail it for its scorer's fault; a larger value lets it be repeated for long."""
QUARANTINED = "its prompt is quarantined: it was there when a scorer died, twice"
_REPEATS = "repeats"
"""The queue of tasks that are asked for again."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Scorer:
    """One scorer that has announced itself."""

    peer: str
    ready: ScorerReady
    num_outstanding: int = 0
    is_rejected: bool = False
    """True where it keeps committing violations, or says that it has failed: its process is being replaced, and gets no work until then."""
    load: ScorerLoad | None = None

    @property
    def room(self) -> int:
        """The number of requests it may still be sent. It may have more processes of a reward model than slots when it announced itself."""
        models = () if self.load is None else self.load.models.values()
        num_slots = max(self.ready.num_slots, *(len(model.processes) for model in models), 0)
        return 0 if self.is_rejected else num_slots * CALLS_PER_SLOT - self.num_outstanding


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A request that a scorer has."""

    request: Request
    scorer: Scorer
    is_held_out: bool
    answer: asyncio.Future[Result | Violation | None]
    """The scorer's answer; None where the scorer will not answer."""

    @property
    def prompt_id(self) -> str:
        return self.request.task.prompt.prompt_id


@dataclasses.dataclass(slots=True, eq=False)
class Scorers:
    """The scorers that do tasks; every task gets one result, however many scorers die over it.

    A scorer is lost when another process announces itself under its name. A task that it had is asked for again, except where its prompt
    was present at two such deaths; no two suspects are with a scorer at once (`rules.quarantine`). An answer is taken only from the scorer
    that was asked, only to the newest request for its task, and only where it can be true (`rules.validation.scores`).

    A scorer has at most `CALLS_PER_SLOT` requests for each slot. Tasks of one stage wait for room in the order in which they came; those
    that are asked for again wait in a queue of their own.
    """

    peers: Peers
    _: dataclasses.KW_ONLY
    expected: int
    ledger: Ledger
    watch: Watch
    quarantine: Quarantine
    score_check: ScoreCheck | None = None
    """The check of answers; without it, and without the next, every message is believed except for its sender's identity."""
    announcement_check: AnnouncementCheck | None = None
    first_request_id: int = 0
    """A number above all that an earlier orchestrator of this run used."""
    changed: Signal = dataclasses.field(default_factory=Signal)
    """Set when a scorer announces itself or answers: there may be room."""
    on_load: Callable[[ScorerLoad], None] = lambda load: None
    """Hears what scorers say of themselves."""
    num_fenced: int = 0
    _scorers: dict[int, Scorer] = dataclasses.field(default_factory=dict)
    _request_ids: Iterator[int] = dataclasses.field(init=False)
    _pending: dict[int, _Pending] = dataclasses.field(default_factory=dict)
    _lines: dict[str, asyncio.Lock] = dataclasses.field(default_factory=lambda: collections.defaultdict(asyncio.Lock))
    """The locks that give the right to send next, by stage."""
    _fenced: dict[str, FencedRequests] = dataclasses.field(default_factory=lambda: collections.defaultdict(FencedRequests))
    """The fenced requests by peer, of all its processes."""
    _suspects: set[str] = dataclasses.field(default_factory=set)
    """Prompts for a scorer that could not be sent to: it is dying."""
    _not_taken: dict[str, Violation] = dataclasses.field(default_factory=dict)
    """The violation in the announcement of a peer, by its name."""

    def __post_init__(self) -> None:
        self._request_ids = itertools.count(self.first_request_id)
        self.watch.explain(self._owed)
        self.peers.on(ScorerReady, self._on_ready)
        self.peers.on(ScorerLoad, self._on_load)
        self.peers.on(Result, self._on_result)
        self.peers.on(Unread, self._on_unread)
        self.peers.on_rejected(self._on_rejected)

    def __iter__(self) -> Iterator[Scorer]:
        return iter(self._scorers.values())

    async def wait_until_ready(self) -> None:
        """Wait until every scorer of the config has announced itself."""
        while len(self._scorers) < self.expected:
            await self.changed.wait()

    @property
    def has_room(self) -> bool:
        """True where some scorer takes another request."""
        return any(scorer.room > 0 for scorer in self._reachable())

    async def request(self, task: ScorerTask, *, by: str, max_lost: int | None = None) -> Result:
        """Have a scorer do a task of the stage `by`, once there is room; never raises for a failure of the task.

        With `max_lost`, the prompt is a held-out one, which the quarantine does not count: the task fails after so many scorers ended over
        it. Cancelling this call withdraws the request: no answer to it counts.
        """
        num_lost, num_refused, line = 0, 0, by
        while True:
            async with self._lines[line]:
                if line == _REPEATS:
                    await self._wait_to_repeat(task)
                    if max_lost is None and self.quarantine.holds(task.prompt.prompt_id):
                        return _failed(QUARANTINED)
                elif not self.has_room:
                    with self.watch.waiting(by, "room in a scorer"):
                        while not self.has_room:
                            await self.changed.wait()
                pending = self._send(task, is_held_out=max_lost is not None)
            answer = await self._answer(pending)
            if isinstance(answer, Result):
                return answer
            num_lost, num_refused = num_lost + (answer is None), num_refused + (answer is not None)
            if num_refused >= MAX_REFUSED:
                return _failed(f"{num_refused} answers could not be true, the last {answer}")
            if max_lost is not None and num_lost >= max_lost:
                return _failed(f"{num_lost} scorers ended before they answered")
            line = _REPEATS

    def end_episode(self, rollout_id: str) -> None:
        """Have the environment of an episode closed. A scorer that cannot be reached has lost it, or closes it when it is reached again."""
        for scorer in self._reachable():
            self.peers.send(scorer.peer, EndEpisode(rollout_id=rollout_id))

    async def _wait_to_repeat(self, task: ScorerTask) -> None:
        """Wait for room beside no other suspect, or until the prompt is quarantined."""
        prompt_id = task.prompt.prompt_id
        while not self.quarantine.holds(prompt_id) and (not self.has_room or self._waits_for_another(prompt_id)):
            await self.changed.wait()

    def _waits_for_another(self, prompt_id: str) -> bool:
        if not self.quarantine.is_suspect("scorer", prompt_id):
            return False
        others = {pending.prompt_id for pending in self._pending.values() if not pending.is_held_out} - {prompt_id}
        return any(self.quarantine.is_suspect("scorer", other) for other in others)

    def _send(self, task: ScorerTask, *, is_held_out: bool) -> _Pending:
        """Send to the scorer with the most room."""
        scorer = max(self._reachable(), key=lambda candidate: candidate.room)
        request = Request(request_id=next(self._request_ids), task=task)
        answer: asyncio.Future[Result | Violation | None] = asyncio.get_running_loop().create_future()
        pending = _Pending(request=request, scorer=scorer, is_held_out=is_held_out, answer=answer)
        scorer.num_outstanding += 1
        self._pending[request.request_id] = pending
        if not self.peers.send(scorer.peer, request):
            self._end(pending, None)  # it may come through all the same
            if not is_held_out:
                self._suspects.add(pending.prompt_id)
        return pending

    async def _answer(self, pending: _Pending) -> Result | Violation | None:
        try:
            return await pending.answer
        except asyncio.CancelledError:
            if self._pending.get(pending.request.request_id) is pending:
                self._end(pending, None)
                if not self.peers.is_expected_to_end:
                    self.peers.send(pending.scorer.peer, CancelRequest(request_id=pending.request.request_id))
            raise

    def _end(self, pending: _Pending, answer: Result | Violation | None) -> None:
        """End the wait for the answer to a request."""
        del self._pending[pending.request.request_id]
        self._fenced[pending.scorer.peer].add((pending.request.request_id,))
        pending.scorer.num_outstanding -= 1
        if not pending.answer.done():
            pending.answer.set_result(answer)
        self.changed.set()

    def _reachable(self) -> list[Scorer]:
        return [scorer for scorer in self if self.peers.is_reachable(scorer.peer)]

    def _owed(self) -> str | None:
        """Name what scorers have not answered, for the report of a stall."""
        for pending in self._pending.values():
            task = pending.request.task
            first = f"of rollout {task.rollout_id}, attempt {task.attempt}, of {pending.scorer.peer}"
            return f"scorers owe {len(self._pending)} scores, the first {first}"
        return None

    # --- what scorers say ---

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
        if number_of(peer) >= self.expected:
            return Violation(
                kind=Kind.IDENTITY, words=f"ScorerReady of {peer}, expected one of the first {self.expected}, which run rewards"
            )
        return None if self.announcement_check is None else self.announcement_check.scorer(ready)

    def _on_rejected(self, peer: str, is_banned: bool) -> None:
        """Give no more work to a scorer that keeps committing violations, or has failed; its tasks are repeated once another is there."""
        for scorer in self._scorers.values():
            scorer.is_rejected |= scorer.peer == peer

    def _lose(self, scorer: Scorer) -> None:
        """Handle the loss of a scorer: its prompts become suspects, unless it is replaced for its violations."""
        suspects, self._suspects = self._suspects, set()
        for pending in [pending for pending in self._pending.values() if pending.scorer is scorer]:
            self._end(pending, None)
            if not pending.is_held_out:
                suspects.add(pending.prompt_id)
        if scorer.is_rejected:
            return
        for prompt_id in sorted(suspects):
            self.ledger.record("suspected", now_s=_now_s(), peer=scorer.peer, suspect=row_of(prompt_id))
        for row in self.quarantine.died("scorer", suspects):
            self.ledger.record("quarantined", now_s=_now_s(), peer=scorer.peer, suspect=row)
        self.ledger.flush()  # seldom, and it must outlive this process: the prompt may be what ends that, too

    def _on_load(self, peer: str, load: ScorerLoad) -> None:
        if (violation := gauges(load)) is not None:
            self.peers.refuse(peer, violation)
            return
        scorer = self._scorers.get(load.scorer_id)
        if scorer is not None:
            scorer.load = load
            self.on_load(load)
        elif peer in self._not_taken:  # it announces itself only once: unrefused, it would be awaited forever
            self.peers.refuse(peer, self._not_taken[peer])
        self.changed.set()  # a scorer that could not be reached is there again

    def _on_result(self, peer: str, result: Result) -> None:
        pending = self._pending.get(result.request_id)
        if pending is None or pending.scorer.peer != peer:
            self._on_unawaited(peer, result)
            return
        if self.score_check is not None and (violation := self.score_check.answer(result, pending.request.task)) is not None:
            self._end(pending, violation)
            self.peers.refuse(peer, violation)
            return
        if len(result.error) > MAX_WORDS:
            result = msgspec.structs.replace(result, error=shorten(result.error))
        self._end(pending, result)
        self.watch.moved()
        self._clear(pending)

    def _clear(self, pending: _Pending) -> None:
        """Clear a suspect whose tasks a scorer has all done."""
        if pending.is_held_out or not self.quarantine.is_suspect("scorer", pending.prompt_id):
            return
        if not any(other.prompt_id == pending.prompt_id for other in self._pending.values()):
            self.quarantine.came_through("scorer", pending.prompt_id)
            self.ledger.record("cleared", now_s=_now_s(), peer="scorer", suspect=row_of(pending.prompt_id))

    def _on_unread(self, peer: str, unread: Unread) -> None:
        """Ask again for an answer that cannot be read."""
        pending = None if unread.request_id is None else self._pending.get(unread.request_id)
        if pending is not None and pending.scorer.peer == peer:
            self._end(pending, Violation(kind=unread.reason, words=unread.words))

    def _on_unawaited(self, peer: str, result: Result) -> None:
        if (result.request_id,) in self._fenced[peer]:
            self.num_fenced += 1
            return
        words = f"Result of request {result.request_id}, of {peer}, which was not asked for it"
        self.peers.refuse(peer, Violation(kind=Kind.UNASKED, words=words))


def _failed(error: str) -> Result:
    return Result(request_id=-1, outcome=Outcome.ERROR, error=error)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
