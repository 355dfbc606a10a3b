"""The engines as the orchestrator knows them: which serve, what each holds, what each was asked for.

An engine is lost when another process announces itself under its name, or says that it will: every request it had is then given back to
whoever asked. A request that cannot be sent is given back at once. An answer is taken only from the engine that was asked, and only where
it can be true (`rules.validation.completions`): one that cannot costs its attempt, and an engine that keeps giving such ones its place.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator

import msgspec

from orchestrator.peers.engine import Engine, Lost, Refused, Request, Sink, keys_of
from orchestrator.peers.peers import Peers
from orchestrator.rules.fenced import FencedRequests
from orchestrator.rules.routing import Loads
from orchestrator.rules.validation.announcements import AnnouncementCheck, gauges, policy_of
from orchestrator.rules.validation.completions import CompletionCheck
from orchestrator.rules.validation.violations import MAX_WORDS, Kind, Violation, number_of, shorten
from pipelinerl.errors import ConfigError
from pipelinerl.messages import (
    Cancel,
    Completion,
    EngineLoad,
    EngineReady,
    Generate,
    Reattach,
    Starting,
    Tensor,
    Tokens,
    Unread,
    WeightsCommitted,
    WeightsRefused,
    WeightsStaged,
)
from pipelinerl.runtime.stage import Signal
from pipelinerl.runtime.watch import Watch

Follower = Callable[[Generate, Tokens], None]
"""Takes a request and what an engine has sampled for it meanwhile."""


class Engines:
    """Sends requests, and hands each completion to whoever asked, once: a result of an older attempt or turn is fenced."""

    def __init__(
        self,
        peers: Peers,
        *,
        expected: int,
        watch: Watch,
        credits: Signal,
        completion_check: CompletionCheck | None = None,
        announcement_check: AnnouncementCheck | None = None,
        newest: Callable[[], int] = lambda: 0,
    ) -> None:
        """`credits` is set with every answer, whoever asked for it: the engine has room again.

        `sampled` and `announced` say what cannot be about answers and announcements, `newest()` the newest version any engine may hold;
        without them, as where recorded answers are replayed, everything is believed but who speaks.
        """
        self.peers = peers
        self._credits = credits
        self.changed = Signal()
        """Set when an engine announces itself or commits a version."""
        self.num_fenced = 0
        self._expected = expected
        self.watch = watch
        self._completion_check = completion_check
        self._announcement_check = announcement_check
        self._newest = newest
        self._engines: dict[int, Engine] = {}
        self._loads = Loads()
        """Of the engines that take new work."""
        self._asked: dict[str, Request] = {}
        """By rollout id."""
        self._fenced: dict[int, FencedRequests] = collections.defaultdict(FencedRequests)
        """By engine, of all its processes."""
        self._not_taken: dict[str, Violation] = {}
        """What cannot be about the announcement of a peer, by its name."""
        self._layout: tuple[Tensor, ...] | None = None
        self._joined: list[Callable[[Engine], None]] = []
        self._died: list[Callable[[int], None]] = []
        self._followers: list[Follower] = []
        self._listeners: list[Callable[[EngineLoad], None]] = []
        watch.explain(self._owed)
        peers.on(Starting, self._on_starting)
        peers.on(EngineReady, self._on_ready)
        peers.on(EngineLoad, self._on_load)
        peers.on(Completion, self._on_completion)
        peers.on(Tokens, self._on_tokens)
        peers.on(Unread, self._on_unread)
        peers.on_condemned(self._on_condemned)

    def __iter__(self):
        return iter(self._engines.values())

    def __getitem__(self, engine_id: int) -> Engine:
        return self._engines[engine_id]

    def serving(self) -> Iterator[Engine]:
        """The engines that take new work: not fenced, and to be reached."""
        return (engine for engine in self if engine.takes_work and self.peers.is_reachable(engine.peer))

    def find(self, engine_id: int) -> Engine | None:
        """The engine of this id; None while it is lost."""
        return self._engines.get(engine_id)

    async def wait_until_ready(self) -> None:
        """Wait until every engine of the config has announced itself."""
        while self.num_missing:
            await self.changed.wait()

    @property
    def num_missing(self) -> int:
        """Engines of the config that have not announced themselves, or are lost."""
        return self._expected - len(self._engines)

    @property
    def max_model_tokens(self) -> int:
        """Longest prompt plus completion that every engine serves."""
        return min(engine.ready.max_model_tokens for engine in self)

    @property
    def num_outstanding(self) -> int:
        """Rollouts asked of engines and not answered."""
        return len(self._asked)

    def outstanding(self) -> dict[int, int]:
        """Outstanding rollouts of each serving engine: what routing looks at."""
        return {engine.engine_id: engine.num_outstanding for engine in self.serving()}

    def serves(self, engine: Engine) -> bool:
        """True while no other process has taken its name."""
        return self._engines.get(engine.engine_id) is engine

    def takes_work(self, engine_id: int) -> bool:
        """True while an engine serves: as `serving` says, of one."""
        engine = self._engines.get(engine_id)
        return engine is not None and engine.takes_work and self.peers.is_reachable(engine.peer)

    def all_hold(self, version: int) -> bool:
        """True where no engine is missing, and all that take new work, of which there is one, sample under `version` or a later one."""
        return not self.num_missing and min(self._loads.versions(), default=version - 1) >= version

    def oldest_version(self) -> int:
        """The newest version that every engine holds that takes new work; 0 where none does."""
        return min(self._loads.versions(), default=0)

    def newest_version(self) -> int | None:
        """The newest version that any engine holds that takes new work; None where none does."""
        return max(self._loads.versions(), default=None)

    def least_busy(self, may_serve: Callable[[int], bool]) -> int | None:
        """The engine for the next group, among those whose version `may_serve`; None where there is none."""
        while (engine_id := self._loads.least_busy([version for version in self._loads.versions() if may_serve(version)])) is not None:
            if self.peers.is_reachable(self._engines[engine_id].peer):
                return engine_id
            self._loads.forget(engine_id)  # until it is heard again
        return None

    def committed(self, engine: Engine, version: int) -> None:
        """An engine samples under `version` from now on, and takes new work if it did not."""
        engine.version, engine.fault = version, ""
        self._note(engine)

    def fence(self, engine: Engine, reason: str) -> None:
        """Give an engine no new work until it commits."""
        engine.fault = reason
        self._note(engine)
        self.changed.set()

    def forgive(self) -> None:
        """Give every engine new work again."""
        for engine in self:
            engine.fault = ""
            self._note(engine)
        self.changed.set()

    def on_joined(self, handler: Callable[[Engine], None]) -> None:
        """Have `handler` called with every engine that announces itself."""
        self._joined.append(handler)

    def on_load(self, handler: Callable[[EngineLoad], None]) -> None:
        """Have `handler` called with the gauges of every engine, each second."""
        self._listeners.append(handler)

    def on_died(self, handler: Callable[[int], None]) -> None:
        """Have `handler` called with the id of every engine that is lost, after its requests were given back."""
        self._died.append(handler)

    def on_tokens(self, handler: Follower) -> None:
        """Have `handler` called with what engines tell of sequences that go on."""
        self._followers.append(handler)

    def layout(self) -> tuple[Tensor, ...]:
        """The layout all engines ask for. Raises `ConfigError` where they differ: they do not serve the same model alike."""
        layouts = {engine.ready.tensors for engine in self} | ({self._layout} if self._layout is not None else set())
        if len(layouts) != 1:
            raise ConfigError(
                f"the {len(self._engines)} engines ask for {len(layouts)} different weight layouts; start them with equal options"
            )
        self._layout = layouts.pop()
        return self._layout

    def ask(self, request: Generate, engine_id: int, *, sink: Sink, lost: Lost, refused: Refused | None = None) -> None:
        """Send a request to an engine; either `sink` is called once with the answer, or `lost` once, or `refused` once, where the answer
        cannot be; by default that is `lost`, too."""
        engine = self._engines[engine_id]
        if not self.peers.send(engine.peer, request):
            self._fenced[engine_id].add(*keys_of(request))  # it may come through all the same
            lost(engine_id)
            return
        self._await(engine, request, oldest=engine.version, sink=sink, lost=lost, refused=refused)

    def adopt(
        self,
        requests: Iterable[tuple[Generate, int]],
        engine_id: int,
        *,
        sink: Callable[[str], Sink],
        lost: Callable[[str], Lost],
        refused: Callable[[str], Refused],
    ) -> None:
        """Of what an engine announced as running, await the answers to these requests (each with the version it was asked at), and have
        it drop the rest."""
        engine = self._engines[engine_id]
        requests = list(requests)
        self.peers.send(engine.peer, Reattach(rollouts={request.rollout_id: request.attempt for request, _ in requests}))
        for request, version in requests:
            name = request.rollout_id
            self._await(engine, request, oldest=version, sink=sink(name), lost=lost(name), refused=refused(name), is_reattached=True)

    def is_refused(self, engine: Engine, said: WeightsStaged | WeightsCommitted | WeightsRefused) -> bool:
        """Refuse what an engine says of a policy that it was never told of."""
        violation = (
            policy_of(said, newest=engine.newest_told, rollback_epoch=engine.rollback_epoch)
            if self._announcement_check is not None
            else None
        )
        if violation is not None:
            self.peers.refuse(engine.peer, violation)
        return violation is not None

    def owes(self, rollout_id: str, attempt: int) -> bool:
        """True while an engine has this attempt and has not answered."""
        asked = self._asked.get(rollout_id)
        return asked is not None and asked.request.attempt == attempt

    def withdraw(self, rollout_id: str, attempt: int) -> None:
        """Have the engine that owes this attempt end it now: it answers as ever, with what it has sampled."""
        assert self.owes(rollout_id, attempt), "nobody has it"
        asked = self._asked[rollout_id]
        asked.is_withdrawn = True
        self.peers.send(self._engines[asked.engine_id].peer, Cancel(rollout_id=rollout_id, attempt=attempt))

    def _await(
        self,
        engine: Engine,
        request: Generate,
        *,
        oldest: int,
        sink: Sink,
        lost: Lost,
        refused: Refused | None,
        is_reattached: bool = False,
    ) -> None:
        before = self._asked.get(request.rollout_id)
        if before is not None:  # nobody waits for that any more
            self._fenced[before.engine_id].add(*before.keys)
        self._asked[request.rollout_id] = Request(
            engine_id=engine.engine_id,
            request=request,
            is_reattached=is_reattached,
            oldest=oldest,
            num_orders=engine.num_orders,
            sink=sink,
            lost=lost,
            refused=refused or (lambda engine_id, violation: lost(engine_id)),
        )
        engine.num_outstanding += 1
        self._note(engine)

    def _on_starting(self, peer: str, starting: Starting) -> None:
        self._lose(number_of(peer))

    def _on_ready(self, peer: str, ready: EngineReady) -> None:
        known = self._engines.get(ready.engine_id)
        if known is not None and known.ready.process_id == ready.process_id:
            return
        if (violation := self._wrong(ready)) is not None:
            self._not_taken[peer] = violation
            self.peers.refuse(peer, violation)
            return
        self._not_taken.pop(peer, None)
        self._lose(ready.engine_id)
        engine = self._engines[ready.engine_id] = Engine(
            engine_id=ready.engine_id,
            peer=peer,
            ready=ready,
            version=ready.version,
            newest_told=max(ready.version, self._newest()),  # an orchestrator that is gone may have told it
            rollback_epoch=ready.rollback_epoch,
        )
        if self._layout is not None or not self.num_missing:  # a trainer may come while none is there
            self.layout()
        self._note(engine)
        for handler in self._joined:
            handler(engine)
        self.changed.set()
        self._credits.set()

    def _wrong(self, ready: EngineReady) -> Violation | None:
        if self._announcement_check is None:
            return None
        if self._layout is not None and ready.tensors != self._layout:
            words = f"EngineReady: a layout of {len(ready.tensors)} tensors, expected the run's own, of {len(self._layout)}"
            return Violation(kind=Kind.BOUNDS, words=words)
        return self._announcement_check.engine(ready, newest=self._newest())

    def _on_condemned(self, peer: str, is_banned: bool) -> None:
        """An engine that keeps lying, or says that it has failed, gets no more work, and what it has is asked of others."""
        engine = self._engines.get(number_of(peer))
        self._expected -= is_banned
        self.changed.set()
        if engine is None:
            return
        engine.is_condemned = True
        self._give_back(engine)
        if is_banned:
            self._lose(engine.engine_id)
            return
        self._note(engine)
        self._credits.set()

    def _give_back(self, engine: Engine) -> None:
        """Tell whoever asked that an engine will not answer."""
        asked = {rollout_id: one for rollout_id, one in self._asked.items() if one.engine_id == engine.engine_id}
        for rollout_id, one in asked.items():
            del self._asked[rollout_id]
            engine.num_outstanding -= 1
            self._fenced[engine.engine_id].add(*one.keys)
            one.lost(engine.engine_id)

    def _lose(self, engine_id: int) -> None:
        engine = self._engines.pop(engine_id, None)
        if engine is None:
            return
        self._loads.forget(engine_id)
        self._give_back(engine)
        for handler in self._died:
            handler(engine_id)
        self.changed.set()
        self._credits.set()

    def _on_load(self, peer: str, load: EngineLoad) -> None:
        engine = self._engines.get(load.engine_id)
        if engine is None:
            if peer in self._not_taken:  # it announces itself but once: as it is, it would be waited for without end
                self.peers.refuse(peer, self._not_taken[peer])
            return
        if (violation := gauges(load)) is not None:
            self.peers.refuse(peer, violation)
            return
        if engine.load is None or load.num_tokens > engine.load.num_tokens:
            self.watch.moved()
        if engine.takes_work and not self._loads.knows(engine.engine_id):  # it could not be reached, and can again
            self._note(engine)
            self._credits.set()
        engine.load = load
        for handler in self._listeners:
            handler(load)

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
            return  # the first tokens of what is adopted went to an orchestrator that is gone: it is followed once it is whole
        asked.noted(tokens)
        for handler in self._followers:
            handler(asked.request, tokens)

    def _on_unread(self, peer: str, unread: Unread) -> None:
        """An answer that cannot even be read costs its attempt, too."""
        asked = self._asked.get(unread.rollout_id)
        if asked is not None and asked.is_answered_by(number_of(peer), unread.attempt, unread.turn):
            self._give_up(asked, Violation(kind=unread.reason, words=unread.words))

    def _asked_of(self, peer: str, rollout_id: str, attempt: int, turn: int | None, *, about: str) -> Request | None:
        """What was asked of this engine and is answered now; None where that is fenced, or was never asked of it, which it is told."""
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
        self.peers.refuse(peer, Violation(kind=Kind.UNASKED, words=words))
        return None

    def _refuse(self, asked: Request, violation: Violation) -> None:
        """What an engine says of an attempt cannot be: the attempt fails, and in the end so does the engine."""
        self._give_up(asked, violation)
        self.peers.refuse(self._engines[asked.engine_id].peer, violation)

    def _give_up(self, asked: Request, violation: Violation) -> None:
        self._end(asked)
        asked.refused(asked.engine_id, violation)

    def _end(self, asked: Request) -> None:
        """Nobody waits for an answer any more."""
        engine = self._engines[asked.engine_id]
        del self._asked[asked.request.rollout_id]
        self._fenced[engine.engine_id].add(*asked.keys)
        engine.num_outstanding -= 1
        self._note(engine)
        self._credits.set()

    def _owed(self) -> str | None:
        """What engines were asked for and have not answered: for the verdict on a stall."""
        for rollout_id, asked in self._asked.items():
            attempt = f"{rollout_id}, attempt {asked.request.attempt}, of engine-{asked.engine_id}"
            return f"engines owe {len(self._asked)} rollouts, the first {attempt}"
        return None

    def _note(self, engine: Engine) -> None:
        """Count an engine among those that take new work, or not."""
        if not self.serves(engine) or not engine.takes_work:
            self._loads.forget(engine.engine_id)
        else:
            self._loads.note(engine.engine_id, version=engine.version, outstanding=engine.num_outstanding)
