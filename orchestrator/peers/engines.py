"""The engines as the orchestrator knows them: which serve, and what each holds. `engine_requests` knows what each was asked for.

An engine is lost when another process announces itself under its name, or says that it will: every request it had is then given back to the
part that asked. `rules.membership` says which engines the run has: one that it does not have is told to end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TypeVar

from orchestrator.peers.engine import Engine
from orchestrator.peers.engine_requests import EngineRequests
from orchestrator.peers.peers import Peers
from orchestrator.rules.admission import num_kept_free
from orchestrator.rules.membership import Membership
from orchestrator.rules.routing import Loads
from orchestrator.rules.validation.announcements import AnnouncementCheck, gauges, policy_of
from orchestrator.rules.validation.completions import CompletionCheck
from orchestrator.rules.validation.violations import Kind, Violation, number_of
from pipelinerl.errors import ConfigError
from pipelinerl.messages import (
    EngineLoad,
    EngineReady,
    Shards,
    Starting,
    Stop,
    Tensor,
    WeightsCommitted,
    WeightsRefused,
    WeightsStaged,
)
from pipelinerl.runtime.membership import State
from pipelinerl.runtime.stage import Signal
from pipelinerl.runtime.watch import Watch

_AboutPolicy = TypeVar("_AboutPolicy", WeightsStaged, WeightsCommitted, WeightsRefused)


class Engines:
    """The engines that have announced themselves, and the handlers to call when one joins, reports its load or is lost."""

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
        membership: Membership | None = None,
        why_unreached: Callable[[EngineReady], str | None] = lambda ready: None,
    ) -> None:
        """Await the engines of `membership`; without one, the first `expected`, for good. `why_unreached` says why no policy could reach
        an engine that joins a run under way.

        Set `credits` with every answer, whichever part asked for it: the engine has room again.

        `completion_check` and `announcement_check` find violations in answers and announcements; `newest()` is the newest version any
        engine may hold. Without the checks, as where recorded answers are replayed, every message is believed except for its sender's
        identity.
        """
        self.peers = peers
        self._credits = credits
        self.changed = Signal()
        """Set when an engine announces itself or commits a version."""
        self.membership = membership or Membership(count=expected)
        self._why_unreached = why_unreached
        self.watch = watch
        self._announcement_check = announcement_check
        self._newest = newest
        self._engines: dict[int, Engine] = {}
        self._loads = Loads()
        """The engines that take new work."""
        self._asleep: set[int] = set()
        """Those that are asleep while others take new work."""
        self._not_taken: dict[str, Violation] = {}
        """The violation in the announcement of a peer, by its name."""
        self._num_tokens_of_gone = 0
        """Tokens sampled by engines that are gone."""
        self._layout: tuple[Tensor, ...] | None = None
        self._joined: list[Callable[[Engine], None]] = []
        self._died: list[Callable[[int], None]] = []
        self._listeners: list[Callable[[EngineLoad], None]] = []
        self.requests = EngineRequests(
            peers, engines=self._engines, note=self._note, watch=watch, credits=credits, completion_check=completion_check
        )
        peers.on(Starting, self._on_starting)
        peers.on(EngineReady, self._on_ready)
        peers.on(EngineLoad, self._on_load)
        peers.on_rejected(self._on_rejected)
        peers.on_silent(self._on_silent)

    def __iter__(self):
        return iter(self._engines.values())

    def __getitem__(self, engine_id: int) -> Engine:
        return self._engines[engine_id]

    def serving(self) -> Iterator[Engine]:
        """Return the engines that take new work: those that are not fenced, and can be reached."""
        return (engine for engine in self if engine.takes_work and self.peers.is_reachable(engine.peer))

    def find(self, engine_id: int) -> Engine | None:
        """Return the engine of this id; None while it is lost."""
        return self._engines.get(engine_id)

    async def wait_until_ready(self) -> None:
        """Wait until every engine of the config has announced itself."""
        while self.num_missing:
            await self.changed.wait()

    @property
    def num_missing(self) -> int:
        """The number of awaited engines that have not announced themselves, or are lost; 1 at least where there is none at all."""
        return len(self.membership.awaited() - self._engines.keys()) or int(not self._engines)

    @property
    def max_model_tokens(self) -> int:
        """The longest prompt plus completion that every engine serves, in tokens."""
        return min(engine.ready.max_model_tokens for engine in self)

    @property
    def num_tokens(self) -> int:
        """Tokens that engines have sampled, those that are gone included."""
        return self._num_tokens_of_gone + sum(engine.load.num_tokens for engine in self if engine.load)

    def outstanding(self) -> dict[int, int]:
        """Return the outstanding rollouts of each serving engine, for routing."""
        return {engine.engine_id: engine.num_outstanding for engine in self.serving()}

    def serves(self, engine: object) -> bool:
        """Return whether the engine's name is still its own: no other process has taken it."""
        return isinstance(engine, Engine) and self._engines.get(engine.engine_id) is engine

    def takes_work(self, engine_id: int) -> bool:
        """Return whether one engine serves, by the same conditions as `serving`."""
        engine = self._engines.get(engine_id)
        return engine is not None and engine.takes_work and self.peers.is_reachable(engine.peer)

    def all_hold(self, version: int) -> bool:
        """Return whether no engine is missing or asleep, at least one takes new work, and all that do sample under `version` or a later
        one.
        """
        is_whole = not self.num_missing and not self._asleep
        return is_whole and min(self._loads.versions(), default=version - 1) >= version

    def num_kept_free(self, max_running: int) -> int:
        """Return how many of `max_running` rollouts are kept for engines that are asleep."""
        held = (self._engines[engine_id].num_outstanding for engine_id in self._asleep)
        return num_kept_free(max_running, num_engines=len(self._engines), held=held)

    def oldest_version(self) -> int:
        """Return the newest version that every engine that takes new work has reached; 0 where none takes any."""
        return min(self._loads.versions(), default=0)

    def newest_version(self) -> int | None:
        """Return the newest version that any engine that takes new work holds; None where none does."""
        return max(self._loads.versions(), default=None)

    def least_busy(self, may_serve: Callable[[int], bool]) -> int | None:
        """Return the engine for the next group, among those whose version `may_serve`; None where there is none."""
        while (engine_id := self._loads.least_busy([version for version in self._loads.versions() if may_serve(version)])) is not None:
            if self.peers.is_reachable(self._engines[engine_id].peer):
                return engine_id
            self._loads.forget(engine_id)  # until it is heard again
        return None

    def committed(self, engine: Engine, version: int) -> None:
        """Note that an engine samples under `version` from now on, and takes new work if it did not."""
        engine.version, engine.fault = version, ""
        self._note(engine)

    def fence(self, engine: Engine, reason: str) -> None:
        """Give an engine no new work until it commits."""
        engine.fault = reason
        self._note(engine)
        self.changed.set()

    def unfence(self) -> None:
        """Give every engine new work again."""
        for engine in self:
            engine.fault = ""
            self._note(engine)
        self.changed.set()

    def rest(self, engine: Engine, *, is_asleep: bool) -> None:
        """Give an engine no new work while it is asleep."""
        engine.is_asleep = is_asleep
        (self._asleep.add if is_asleep else self._asleep.discard)(engine.engine_id)
        self._note(engine)
        self.changed.set()
        self._credits.set()

    def leave(self, engine_id: int, reason: str) -> None:
        """Give an engine no new work, as it is to leave; with an empty reason, give it some again, as it stays."""
        if (engine := self.find(engine_id)) is None:
            return
        engine.leaves_for = reason
        self._note(engine)
        self.changed.set()
        self._credits.set()

    def dismiss(self, engine_id: int, reason: str) -> None:
        """Let go of an engine that is to leave, or is given up: what it has is asked of others, and it is told to end."""
        engine = self._engines.get(engine_id)
        if engine is not None:
            engine.leaves_for = reason
            self._note(engine)
            self.requests.give_back(engine)
            self._lose(engine_id)
        self._tell_to_end(f"{self.peers.role}-{engine_id}", reason)

    def on_joined(self, handler: Callable[[Engine], None]) -> None:
        """Have `handler` called with every engine that announces itself."""
        self._joined.append(handler)

    def on_load(self, handler: Callable[[EngineLoad], None]) -> None:
        """Have `handler` called with the gauges of every engine, each second."""
        self._listeners.append(handler)

    def on_died(self, handler: Callable[[int], None]) -> None:
        """Have `handler` called with the id of every engine that is lost, after its requests were given back."""
        self._died.append(handler)

    def layout(self) -> tuple[Tensor, ...]:
        """Return the layout that all engines ask for. Raises `ConfigError` where they differ: they do not serve the same model alike."""
        layouts = {engine.ready.tensors for engine in self} | ({self._layout} if self._layout is not None else set())
        if len(layouts) != 1:
            raise ConfigError(
                f"the {len(self._engines)} engines ask for {len(layouts)} different weight layouts; start them with equal options"
            )
        self._layout = layouts.pop()
        return self._layout

    def shards(self) -> Shards:
        """Return the shards of an engine's ranks, the same for all. Raises `ConfigError` where they differ."""
        if any(engine.ready.shards != other.ready.shards for engine, other in itertools.pairwise(self)):
            raise ConfigError("the engines' ranks hold different shards of the model; start them with equal options")
        return next((engine.ready.shards for engine in self), ())

    def on_policy(self, kind: type[_AboutPolicy], handler: Callable[[Engine, _AboutPolicy], None]) -> None:
        """Have `handler` called with what an engine says about a policy. A message about one that it was never told of is refused."""

        def hear(peer: str, said: _AboutPolicy) -> None:
            if (engine := self.find(said.engine_id)) is None:  # it is lost
                return
            violation = policy_of(said, newest=engine.newest_told, rollback_epoch=engine.rollback_epoch)
            if violation is not None and self._announcement_check is not None:
                self.peers.refuse(engine.peer, violation)
            else:
                handler(engine, said)

        self.peers.on(kind, hear)

    def _on_starting(self, peer: str, starting: Starting) -> None:
        self._lose(number_of(peer))

    def _on_ready(self, peer: str, ready: EngineReady) -> None:
        known = self._engines.get(ready.engine_id)
        if known is not None and known.ready.process_id == ready.process_id:
            return
        if not self.membership.is_meant(ready.engine_id, request_id=ready.request_id, size=ready.tensor_parallel_size):
            self.peers.send(peer, Stop(reason=f"another engine is engine-{ready.engine_id} now, or is to be"))
            if known is None:  # else its silence tells that it has lost its connection to this one
                self.peers.forget(peer)
            return
        if (why := self._why_not_taken(ready)) is not None:
            self._lose(ready.engine_id)
            self.membership.lost(ready.engine_id, why)
            self._tell_to_end(peer, why)
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
        self.membership.joined(ready.engine_id)
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

    def _why_not_taken(self, ready: EngineReady) -> str | None:
        """Say why an engine that announces itself is not the run's, or could not serve it; None where all is well."""
        if not self.membership.may_join(ready.engine_id):
            return f"engine-{ready.engine_id} is not one of the engines that the run has now (`pipelinerl scale`)"
        return None if ready.engine_id in self.membership.awaited() else self._why_unreached(ready)

    def _tell_to_end(self, peer: str, reason: str) -> None:
        self.peers.send(peer, Stop(reason=reason))
        self.peers.forget(peer)

    def _on_silent(self, peer: str, words: str) -> bool:
        """Give up a spare that has fallen silent; return False for an engine without which the run does not go on."""
        engine_id = number_of(peer)
        is_leaving = self.membership.state(engine_id) in (State.DRAINING, State.LEFT, State.LOST)  # a last word may come after it has left
        if not is_leaving and not self.membership.may_be_lost(engine_id):
            return False
        self.lost(engine_id, words)
        return True

    def lost(self, engine_id: int, reason: str) -> None:
        """Note that an engine will not serve any more, though nobody asked it to leave: what it had is asked of others."""
        self.membership.lost(engine_id, reason)
        self.dismiss(engine_id, reason)

    def _on_rejected(self, peer: str, is_banned: bool) -> None:
        """Give no more work to an engine that keeps committing violations, or has failed; its rollouts are asked of others."""
        engine = self._engines.get(number_of(peer))
        if is_banned:
            self.membership.lost(number_of(peer), "it kept saying what cannot be")
        self.changed.set()
        if engine is None:
            return
        engine.is_rejected = True
        self.requests.give_back(engine)
        if is_banned:
            self._lose(engine.engine_id)
            return
        self._note(engine)
        self._credits.set()

    def _lose(self, engine_id: int) -> None:
        engine = self._engines.pop(engine_id, None)
        if engine is None:
            return
        self._loads.forget(engine_id)
        self._asleep.discard(engine_id)
        self._num_tokens_of_gone += engine.load.num_tokens if engine.load else 0
        self.requests.give_back(engine)
        self.membership.ended(engine_id)
        for handler in self._died:
            handler(engine_id)
        self.changed.set()
        self._credits.set()

    def _on_load(self, peer: str, load: EngineLoad) -> None:
        engine = self._engines.get(load.engine_id)
        if engine is None:
            if peer in self._not_taken:  # it announces itself only once: unrefused, it would be awaited forever
                self.peers.refuse(peer, self._not_taken[peer])
            elif self.membership.state(load.engine_id) in (State.LEFT, State.LOST):
                self._tell_to_end(peer, "the run has gone on without it")
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

    def _note(self, engine: Engine) -> None:
        """Count an engine among those that take new work, or not."""
        if not self.serves(engine) or not engine.takes_work:
            self._loads.forget(engine.engine_id)
        else:
            self._loads.note(engine.engine_id, version=engine.version, outstanding=engine.num_outstanding)
