"""The engines as the orchestrator knows them: which serve, what each holds, what each was asked for.

An engine is lost when another process announces itself under its name, or says that it will: every request it had is then given back to
whoever asked. A request that cannot be sent is given back at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from orchestrator.rules.routing import Loads
from orchestrator.state.peers import Peers
from pipelinerl.errors import ConfigError
from pipelinerl.messages import Adopt, Cancel, Completion, EngineLoad, EngineReady, Generate, Starting, Tensor, Tokens
from pipelinerl.stages import Signal
from pipelinerl.watch import Watch

Sink = Callable[[Completion, int], None]
"""Takes a completion and the id of the engine that made it."""
Lost = Callable[[int], None]
"""Is told that the engine of this id will not answer."""
Follower = Callable[[Generate, Tokens], None]
"""Takes a request and what an engine has sampled for it meanwhile."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request that an engine has."""

    engine_id: int
    attempt: int
    turn: int
    request: Generate | None
    """None for one that the orchestrator before had asked for."""
    sink: Sink
    lost: Lost


@dataclasses.dataclass(slots=True, kw_only=True)
class Engine:
    """One engine that has announced itself."""

    engine_id: int
    peer: str
    ready: EngineReady
    version: int = 0
    """Version it samples under."""
    fault: str = ""
    """Why it takes no new work; empty while it does. Its running sequences go on under its old version."""
    num_outstanding: int = 0
    """Rollouts it was asked for and has not answered."""
    load: EngineLoad | None = None
    """Its last gauges; None before the first."""


class Engines:
    """Sends requests, and hands each completion to whoever asked, once: a result of an older attempt or turn is fenced."""

    def __init__(self, peers: Peers, *, expected: int, watch: Watch, credits: Signal) -> None:
        """`credits` is set with every answer, whoever asked for it: the engine has room again."""
        self.peers = peers
        self._credits = credits
        self.changed = Signal()
        """Set when an engine announces itself or commits a version."""
        self.num_fenced = 0
        self._expected = expected
        self.watch = watch
        self._engines: dict[int, Engine] = {}
        self._loads = Loads()
        """Of the engines that take new work."""
        self._asked: dict[str, _Asked] = {}
        """By rollout id."""
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

    def __iter__(self):
        return iter(self._engines.values())

    def __getitem__(self, engine_id: int) -> Engine:
        return self._engines[engine_id]

    def serving(self) -> Iterator[Engine]:
        """The engines that take new work: not fenced, and to be reached."""
        return (engine for engine in self if not engine.fault and self.peers.is_reachable(engine.peer))

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
        return engine is not None and not engine.fault and self.peers.is_reachable(engine.peer)

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

    def ask(self, request: Generate, engine_id: int, *, sink: Sink, lost: Lost) -> None:
        """Send a request to an engine; either `sink` is called once with the answer, or `lost` once."""
        engine = self._engines[engine_id]
        if not self.peers.send(engine.peer, request):
            lost(engine_id)
            return
        self._await(request.rollout_id, request.attempt, engine, request=request, sink=sink, lost=lost)

    def adopt(self, rollouts: Mapping[str, int], engine_id: int, *, sink: Callable[[str], Sink], lost: Callable[[str], Lost]) -> None:
        """Of what an engine announced as running, await these answers (attempts by rollout id), and have it drop the rest."""
        engine = self._engines[engine_id]
        self.peers.send(engine.peer, Adopt(rollouts=dict(rollouts)))
        for rollout_id, attempt in rollouts.items():
            self._await(rollout_id, attempt, engine, request=None, sink=sink(rollout_id), lost=lost(rollout_id))

    def owes(self, rollout_id: str, attempt: int) -> bool:
        """True while an engine has this attempt and has not answered."""
        asked = self._asked.get(rollout_id)
        return asked is not None and asked.attempt == attempt

    def withdraw(self, rollout_id: str, attempt: int) -> None:
        """Have the engine that owes this attempt end it now: it answers as ever, with what it has sampled."""
        assert self.owes(rollout_id, attempt), "nobody has it"
        peer = self._engines[self._asked[rollout_id].engine_id].peer
        self.peers.send(peer, Cancel(rollout_id=rollout_id, attempt=attempt))

    def _await(self, rollout_id: str, attempt: int, engine: Engine, *, request: Generate | None, sink: Sink, lost: Lost) -> None:
        self._asked[rollout_id] = _Asked(
            engine_id=engine.engine_id, attempt=attempt, turn=request.turn if request else 0, request=request, sink=sink, lost=lost
        )
        engine.num_outstanding += 1
        self._note(engine)

    def _on_starting(self, peer: str, starting: Starting) -> None:
        self._lose(int(peer.rpartition("-")[2]))

    def _on_ready(self, peer: str, ready: EngineReady) -> None:
        known = self._engines.get(ready.engine_id)
        if known is not None and known.ready.process_id == ready.process_id:
            return
        self._lose(ready.engine_id)
        engine = self._engines[ready.engine_id] = Engine(engine_id=ready.engine_id, peer=peer, ready=ready, version=ready.version)
        if self._layout is not None:
            self.layout()
        self._note(engine)
        for handler in self._joined:
            handler(engine)
        self.changed.set()
        self._credits.set()

    def _lose(self, engine_id: int) -> None:
        if self._engines.pop(engine_id, None) is None:
            return
        self._loads.forget(engine_id)
        asked = {rollout_id: one for rollout_id, one in self._asked.items() if one.engine_id == engine_id}
        for rollout_id, one in asked.items():
            del self._asked[rollout_id]
            one.lost(engine_id)
        for handler in self._died:
            handler(engine_id)
        self.changed.set()
        self._credits.set()

    def _on_load(self, peer: str, load: EngineLoad) -> None:
        engine = self._engines.get(load.engine_id)
        if engine is None:
            return
        if engine.load is None or load.num_tokens > engine.load.num_tokens:
            self.watch.moved()
        if not engine.fault and not self._loads.knows(engine.engine_id):  # it could not be reached, and can again
            self._note(engine)
            self._credits.set()
        engine.load = load
        for handler in self._listeners:
            handler(load)

    def _on_completion(self, peer: str, completion: Completion) -> None:
        asked = self._asked.get(completion.rollout_id)
        if asked is None or (asked.attempt, asked.turn) != (completion.attempt, completion.turn):
            self.num_fenced += 1
            return
        del self._asked[completion.rollout_id]
        engine = self._engines[asked.engine_id]
        engine.num_outstanding -= 1
        self._note(engine)
        self._credits.set()
        asked.sink(completion, asked.engine_id)

    def _on_tokens(self, peer: str, tokens: Tokens) -> None:
        asked = self._asked.get(tokens.rollout_id)
        if asked is None or asked.attempt != tokens.attempt:
            self.num_fenced += 1
            return
        if asked.request is None:
            return  # its first tokens went to an orchestrator that is gone: it is followed once it is whole
        for handler in self._followers:
            handler(asked.request, tokens)

    def _owed(self) -> str | None:
        """What engines were asked for and have not answered: for the verdict on a stall."""
        for rollout_id, asked in self._asked.items():
            owed = f"engines owe {len(self._asked)} rollouts, the first {rollout_id}, attempt {asked.attempt}, of engine-{asked.engine_id}"
            return owed
        return None

    def _note(self, engine: Engine) -> None:
        """Count an engine among those that take new work, or not."""
        if engine.fault:
            self._loads.forget(engine.engine_id)
        else:
            self._loads.note(engine.engine_id, version=engine.version, outstanding=engine.num_outstanding)
