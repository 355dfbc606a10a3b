"""The engines as the orchestrator knows them: which serve, what each holds, what each was asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from orchestrator.rules.routing import Loads
from orchestrator.state.peers import Peers
from pipelinerl.errors import ConfigError
from pipelinerl.messages import Completion, EngineLoad, EngineReady, Generate, Tensor
from pipelinerl.stages import Signal
from pipelinerl.watch import Watch

Sink = Callable[[Completion, int], None]
"""Takes a completion and the id of the engine that made it."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Engine:
    """One engine that has announced itself."""

    engine_id: int
    peer: str
    ready: EngineReady
    version: int = 0
    """Version it samples under."""
    num_outstanding: int = 0
    """Rollouts it was asked for and has not answered."""
    load: EngineLoad | None = None
    """Its last gauges; None before the first."""


class Engines:
    """Sends requests, and hands each completion to whoever asked, once: a result of an older attempt is fenced."""

    def __init__(self, peers: Peers, *, expected: int, watch: Watch, credits: Signal) -> None:
        """`credits` is set with every answer, whoever asked for it: the engine has room again."""
        self.peers = peers
        self._credits = credits
        self.changed = Signal()
        """Set when an engine announces itself or commits a version."""
        self.num_fenced = 0
        self._expected = expected
        self._watch = watch
        self._engines: dict[int, Engine] = {}
        self._loads = Loads()
        self._asked: dict[str, tuple[int, int, Sink]] = {}
        """By rollout id: engine, attempt, who asked."""
        watch.explain(self._owed)
        peers.on(EngineReady, self._on_ready)
        peers.on(EngineLoad, self._on_load)
        peers.on(Completion, self._on_completion)

    def __iter__(self):
        return iter(self._engines.values())

    def __getitem__(self, engine_id: int) -> Engine:
        return self._engines[engine_id]

    async def wait_until_ready(self) -> None:
        """Wait until every engine of the config has announced itself."""
        while len(self._engines) < self._expected:
            await self.changed.wait()

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
        return {engine.engine_id: engine.num_outstanding for engine in self}

    def all_hold(self, version: int) -> bool:
        """True where every engine samples under `version` or a later one."""
        return min(self._loads.versions(), default=version) >= version

    def oldest_version(self) -> int:
        """The newest version that every engine holds."""
        return min(self._loads.versions())

    def newest_version(self) -> int:
        """The newest version that any engine holds."""
        return max(self._loads.versions())

    def least_busy(self, may_serve: Callable[[int], bool]) -> int | None:
        """The engine for the next group, among those whose version `may_serve`; None where there is none."""
        return self._loads.least_busy([version for version in self._loads.versions() if may_serve(version)])

    def committed(self, engine: Engine, version: int) -> None:
        """An engine samples under `version` from now on; repeated and reordered news are harmless."""
        engine.version = max(engine.version, version)
        self._note(engine)

    def layout(self) -> tuple[Tensor, ...]:
        """The layout all engines ask for. Raises `ConfigError` where they differ: they do not serve the same model alike."""
        layouts = {engine.ready.tensors for engine in self}
        if len(layouts) != 1:
            raise ConfigError(
                f"the {len(self._engines)} engines ask for {len(layouts)} different weight layouts; start them with equal options"
            )
        return layouts.pop()

    def ask(self, request: Generate, engine_id: int, sink: Sink) -> None:
        """Send a request to an engine; `sink` is called once with the answer."""
        engine = self._engines[engine_id]
        self._asked[request.rollout_id] = (engine_id, request.attempt, sink)
        engine.num_outstanding += 1
        self._note(engine)
        self.peers.hub.send(engine.peer, request)

    def _on_ready(self, peer: str, ready: EngineReady) -> None:
        engine = self._engines[ready.engine_id] = Engine(engine_id=ready.engine_id, peer=peer, ready=ready)
        self._note(engine)
        self.changed.set()

    def _on_load(self, peer: str, load: EngineLoad) -> None:
        engine = self._engines[load.engine_id]
        if engine.load is None or load.num_tokens > engine.load.num_tokens:
            self._watch.moved()
        engine.load = load

    def _on_completion(self, peer: str, completion: Completion) -> None:
        asked = self._asked.get(completion.rollout_id)
        if asked is None or asked[1] != completion.attempt:
            self.num_fenced += 1
            return
        del self._asked[completion.rollout_id]
        engine_id, _, sink = asked
        engine = self._engines[engine_id]
        engine.num_outstanding -= 1
        self._note(engine)
        self._credits.set()
        sink(completion, engine_id)

    def _owed(self) -> str | None:
        """What engines were asked for and have not answered: for the verdict on a stall."""
        for rollout_id, (engine_id, attempt, _) in self._asked.items():
            return f"engines owe {len(self._asked)} rollouts, the first {rollout_id}, attempt {attempt}, of {self._engines[engine_id].peer}"
        return None

    def _note(self, engine: Engine) -> None:
        self._loads.note(engine.engine_id, version=engine.version, outstanding=engine.num_outstanding)
