"""The requests that engines have and have not answered yet.

An answer is taken only from the engine that was asked, and only where it can be true (`rules.validation.completions`). An impossible answer
costs its attempt, and an engine that keeps giving such answers is replaced. A result of an older attempt or turn is fenced.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from orchestrator.peers.engine import Engine, Lost, Moved, Refused, Request, Sink, keys_of
from orchestrator.peers.peers import Peers
from orchestrator.rules.fenced import FencedRequests
from orchestrator.rules.validation.completions import CompletionCheck
from orchestrator.rules.validation.violations import MAX_WORDS, Kind, Violation, number_of, shorten
from pipelinerl.engine.held_images import ImagesSent
from pipelinerl.messages import Cancel, Completion, Generate, Reattach, Tokens, Unread
from pipelinerl.runtime.stage import Signal
from pipelinerl.runtime.watch import Watch

Follower = Callable[[Generate, Tokens], None]
"""The follower takes a request and the tokens that an engine has sampled for it so far."""
Answered = Callable[[Request, Completion], None]
"""The callback takes a request that was open, and the answer to it."""


class EngineRequests:
    """The open requests. Each completion goes once to the part that asked for it.

    A request that cannot be sent is given back at once; so is every request of an engine that is lost.
    """

    def __init__(
        self,
        peers: Peers,
        *,
        engines: Mapping[int, Engine],
        note: Callable[[Engine], None],
        watch: Watch,
        credits: Signal,
        completion_check: CompletionCheck | None,
    ) -> None:
        """Take `engines`, those that have announced themselves, by id; `note` is told of each whose load has changed."""
        self.num_fenced = 0
        self._peers = peers
        self._engines = engines
        self._note = note
        self._credits = credits
        self._completion_check = completion_check
        self._asked: dict[str, Request] = {}
        """The open requests by rollout id."""
        self._fenced: dict[int, FencedRequests] = collections.defaultdict(FencedRequests)
        """The fenced requests by engine, of all its processes."""
        self._followers: list[Follower] = []
        self._listeners: list[Answered] = []
        watch.explain(self._owed)
        peers.on(Completion, self._on_completion)
        peers.on(Tokens, self._on_tokens)
        peers.on(Unread, self._on_unread)

    def __len__(self) -> int:
        """Return the number of rollouts asked of engines and not answered."""
        return len(self._asked)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._asked.values())

    def on_tokens(self, handler: Follower) -> None:
        """Have `handler` called with the tokens that engines send of unfinished sequences."""
        self._followers.append(handler)

    def on_answered(self, handler: Answered) -> None:
        """Have `handler` called with every answer that is taken, before the part that asked for it."""
        self._listeners.append(handler)

    def ask(
        self, request: Generate, engine_id: int, *, sink: Sink, lost: Lost, refused: Refused | None = None, moved: Moved | None = None
    ) -> None:
        """Send a request to an engine. One of the callbacks is called, once: `sink` with the answer, `lost`, or `refused` where the answer
        is impossible. Without `refused`, `lost` is called in its place. `moved` takes the answer where the sequence was to move (`move`).
        """
        engine = self._engines[engine_id]
        if not self._peers.send(engine.peer, engine.images.stripped(request)):
            engine.images = ImagesSent()  # it may come through, or not
            self._fenced[engine_id].add(*keys_of(request))
            lost(engine_id)
            return
        oldest = engine.version if request.version is None else request.version
        self._await(engine, request, oldest=oldest, sink=sink, lost=lost, refused=refused, moved=moved)

    def reattach(
        self,
        requests: Iterable[tuple[Generate, int]],
        engine_id: int,
        *,
        sink: Callable[[str], Sink],
        lost: Callable[[str], Lost],
        refused: Callable[[str], Refused],
        moved: Callable[[str], Moved | None] = lambda name: None,
    ) -> None:
        """Await the answers to those `requests` (each with the version it was asked at) that an engine announced as running.

        The engine drops the rest. `moved` takes the answer where the orchestrator before had asked the engine to end the sequence, to move.
        """
        engine = self._engines[engine_id]
        requests = list(requests)
        self._peers.send(engine.peer, Reattach(rollouts={request.rollout_id: request.attempt for request, _ in requests}))
        for request, version in requests:
            name = request.rollout_id
            callbacks = {"sink": sink(name), "lost": lost(name), "refused": refused(name), "moved": moved(name)}
            self._await(engine, request, oldest=version, **callbacks, is_reattached=True)

    def owes(self, rollout_id: str, attempt: int) -> bool:
        """Return whether an engine has this attempt and has not answered."""
        asked = self._asked.get(rollout_id)
        return asked is not None and asked.request.attempt == attempt

    def attempt_of(self, rollout_id: str) -> int | None:
        """Return the attempt of a rollout that an engine has and has not answered; None where none has any."""
        asked = self._asked.get(rollout_id)
        return None if asked is None else asked.request.attempt

    def withdraw(self, rollout_id: str, attempt: int) -> None:
        """Have the engine that owes this attempt end it now: it answers as usual, with the tokens sampled so far."""
        assert self.owes(rollout_id, attempt), "nobody has it"
        asked = self._asked[rollout_id]
        asked.is_withdrawn = True
        self._peers.send(self._engines[asked.engine_id].peer, Cancel(rollout_id=rollout_id, attempt=attempt))

    def move(self, rollout_id: str, attempt: int, *, target: int | None = None) -> bool:
        """Have the engine that owes this attempt end it between two passes, so that another one (`target`; None: any) goes on after what it
        has written. Return False where it is owed no more, or cannot move.
        """
        asked = self._asked.get(rollout_id)
        if asked is None or asked.request.attempt != attempt or asked.moved is None or asked.is_withdrawn:
            return False
        asked.is_moving, asked.target = True, target
        self.withdraw(rollout_id, attempt)
        return True

    def move_all(self, engine_id: int) -> int:
        """Have all that an engine has and that can move go on elsewhere; return how many those are."""
        held = [one for one in self._asked.values() if one.engine_id == engine_id]
        return sum(self.move(one.request.rollout_id, one.request.attempt) for one in held)

    def num_moving(self, engine_id: int) -> int:
        """Return the sequences that an engine was asked to end so that they move, and has not answered."""
        return sum(one.engine_id == engine_id and one.is_moving for one in self._asked.values())

    def _await(
        self,
        engine: Engine,
        request: Generate,
        *,
        oldest: int,
        sink: Sink,
        lost: Lost,
        refused: Refused | None,
        moved: Moved | None = None,
        is_reattached: bool = False,
    ) -> None:
        before = self._asked.get(request.rollout_id)
        if before is not None:  # nobody waits for that any more
            self._fenced[before.engine_id].add(*keys_of(before.request))
        self._asked[request.rollout_id] = Request(
            engine_id=engine.engine_id,
            request=request,
            is_reattached=is_reattached,
            oldest=oldest,
            num_orders=engine.num_orders,
            sink=sink,
            lost=lost,
            refused=refused or (lambda engine_id, violation: lost(engine_id)),
            moved=moved,
        )
        engine.num_outstanding += 1
        self._note(engine)

    def give_back(self, engine: Engine) -> None:
        """Give back every request that an engine has: it will not answer."""
        asked = {rollout_id: one for rollout_id, one in self._asked.items() if one.engine_id == engine.engine_id}
        for rollout_id, one in asked.items():
            del self._asked[rollout_id]
            engine.num_outstanding -= 1
            self._fenced[engine.engine_id].add(*keys_of(one.request))
            one.lost(engine.engine_id)

    def _on_completion(self, peer: str, completion: Completion) -> None:
        name = completion.rollout_id
        asked = self._asked_of(peer, name, completion.attempt, completion.turn, about="Completion")
        if asked is None:
            return
        engine = self._engines[asked.engine_id]
        if self._completion_check is not None and (violation := asked.violation_in(completion, engine, self._completion_check)) is not None:
            self._refuse(asked, violation)
            return
        self._end(asked)
        if len(completion.error) > MAX_WORDS:
            completion = msgspec.structs.replace(completion, error=shorten(completion.error))
        for handler in self._listeners:
            handler(asked, completion)
        if asked.moved is not None and asked.goes_on_after(completion):
            asked.moved(completion, asked.engine_id, asked.target)
        else:
            asked.sink(completion, asked.engine_id)

    def _on_tokens(self, peer: str, tokens: Tokens) -> None:
        asked = self._asked_of(peer, tokens.rollout_id, tokens.attempt, None, about="Tokens")
        if asked is None:
            return
        if self._completion_check is not None:
            violation = self._completion_check.tokens(tokens, asked.known(self._engines[asked.engine_id]))
            if violation is not None:
                self._refuse(asked, violation)
                return
        if asked.is_reattached or not self._followers:
            return  # its first tokens went to an earlier orchestrator: followers get it once it is complete
        asked.noted(tokens)
        for handler in self._followers:
            handler(asked.request, tokens)

    def _on_unread(self, peer: str, unread: Unread) -> None:
        """Fail the attempt of an answer that cannot be read."""
        asked = self._asked.get(unread.rollout_id)
        if asked is not None and asked.is_answered_by(number_of(peer), unread.attempt, unread.turn):
            self._give_up(asked, Violation(kind=unread.reason, words=unread.words))

    def _asked_of(self, peer: str, rollout_id: str, attempt: int, turn: int | None, *, about: str) -> Request | None:
        """Return the request that this engine answers now; None where the answer is fenced, or unasked for, which is a violation."""
        engine_id = number_of(peer)
        asked = self._asked.get(rollout_id)
        if asked is not None and asked.is_answered_by(engine_id, attempt, asked.request.turn if turn is None else turn):
            return asked
        key = (rollout_id, attempt) if turn is None else (rollout_id, attempt, turn)
        if key in self._fenced[engine_id] or engine_id not in self._engines:
            self.num_fenced += 1
            return None
        known = "nobody was" if asked is None else f"engine-{asked.engine_id} was, for attempt {asked.request.attempt}"
        words = f"{about} of rollout {rollout_id}, attempt {attempt}, of {peer}, which was not asked for it: {known}"
        self._peers.refuse(peer, Violation(kind=Kind.UNASKED, words=words))
        return None

    def _refuse(self, asked: Request, violation: Violation) -> None:
        """Fail an attempt whose answer is impossible, and count the violation of its engine."""
        self._give_up(asked, violation)
        self._peers.refuse(self._engines[asked.engine_id].peer, violation)

    def _give_up(self, asked: Request, violation: Violation) -> None:
        self._end(asked)
        asked.refused(asked.engine_id, violation)

    def _end(self, asked: Request) -> None:
        """End the wait for an answer."""
        engine = self._engines[asked.engine_id]
        del self._asked[asked.request.rollout_id]
        self._fenced[engine.engine_id].add(*keys_of(asked.request))
        engine.num_outstanding -= 1
        self._note(engine)
        self._credits.set()

    def _owed(self) -> str | None:
        """Name what engines have not answered, for the report of a stall."""
        for rollout_id, asked in self._asked.items():
            attempt = f"{rollout_id}, attempt {asked.request.attempt}, of engine-{asked.engine_id}"
            return f"engines owe {len(self._asked)} rollouts, the first {attempt}"
        return None
