"""The process reward model as the orchestrator knows it: engines on the scorers' hub, asked in chunks, each replaced when it is killed.

A trace stays with one engine, which keeps what it has computed of it. `rules.membership` says which engines the model has: one that it does
not have is told to end. An engine that is lost has lost its traces: they begin anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import msgspec

from orchestrator.peers.peers import Peers
from orchestrator.rules.membership import Membership
from orchestrator.rules.routing import route
from orchestrator.rules.validation.announcements import gauges
from orchestrator.rules.validation.violations import Kind, Violation, number_of
from pipelinerl.messages import Cancel, PrmLoad, PrmReady, StepsScored, Stop, TraceTokens
from pipelinerl.runtime.membership import State
from pipelinerl.runtime.stage import Signal


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class PrmEngine:
    """One process of the model."""

    engine_id: int
    """Its number among the scorers."""
    peer: str
    process_id: int
    load: PrmLoad | None = None
    """Its last gauges; None before the first."""
    num_outstanding: int = 0
    """Traces that it has."""
    leaves_for: str = ""
    """Why it is to leave; empty where it stays."""
    is_behind: bool = False
    """True where something could not be sent to it: it is given nothing until it is heard from again."""

    @property
    def is_busy(self) -> bool:
        """True until it has ended all that it had."""
        return self.num_outstanding > 0


class Prm:
    """The model's engines. It sends traces, and reports when an engine has lost those that it had: they are then to be sent again."""

    def __init__(self, peers: Peers, *, membership: Membership, is_episodic: bool = False) -> None:
        self.membership = membership
        self.is_episodic = is_episodic
        """True in a run with an environment: an episode is sent once it is over, and its steps are its turns."""
        self.changed = Signal()
        """Set when an engine announces itself, or is gone."""
        self._peers = peers
        self._engines: dict[int, PrmEngine] = {}
        self._gone = PrmLoad(prm_id=0, num_traces=0, num_steps=0, num_trace_tokens=0, num_computed=0, num_uncached_tokens=0, busy_s=0.0)
        """What engines that are gone had done."""
        self._on_lost: Callable[[PrmEngine, bool], None] = lambda engine, has_died: None
        self._on_room: Callable[[], None] = lambda: None
        peers.on(PrmReady, self._on_ready)
        peers.on(PrmLoad, self._on_load)
        peers.on_silent(self._on_silent)
        peers.on_rejected(self._on_rejected)

    def __iter__(self) -> Iterator[PrmEngine]:
        return iter(self._engines.values())

    def find(self, engine_id: int) -> PrmEngine | None:
        """Return the engine of this number; None while it is lost."""
        return self._engines.get(engine_id)

    def serves(self, engine: object) -> bool:
        """Return whether the engine's name is still its own: no other process has taken it."""
        return any(engine is one for one in self)

    async def wait_until_ready(self) -> None:
        """Wait until every engine that the run began with has announced itself."""
        while self.membership.awaited() - self._engines.keys() or not self._engines:
            await self.changed.wait()

    def load(self) -> PrmLoad | None:
        """Return the gauges of all engines together, in those that only grow the engines that are gone included; None before the first."""
        loads = [engine.load for engine in self if engine.load is not None]
        return _sum_of(self._gone, *loads) if loads else None

    def busy_s(self) -> float:
        """Return the seconds in which engines have scored, summed over them, those that are gone included."""
        return 0.0 if (load := self.load()) is None else load.busy_s

    def on_scored(self, handler: Callable[[PrmEngine, StepsScored], None]) -> None:
        """Have `handler` called with every answer."""

        def on_scored(peer: str, scored: StepsScored) -> None:
            if (engine := self.find(number_of(peer))) is not None:
                handler(engine, scored)
            elif self.membership.state(number_of(peer)) is None:
                words = f"StepsScored of rollout {scored.rollout_id[:100]}, of {peer}, which follows no trace"
                self._peers.refuse(peer, Violation(kind=Kind.UNASKED, words=words))

        self._peers.on(StepsScored, on_scored)

    def on_lost(self, handler: Callable[[PrmEngine, bool], None]) -> None:
        """Have `handler` called with an engine that has lost all its traces; with True where its process has died, or may have."""
        self._on_lost = handler

    def on_room(self, handler: Callable[[], None]) -> None:
        """Have `handler` called when there is an engine for traces that no engine has."""
        self._on_room = handler

    def least_busy(self) -> PrmEngine | None:
        """Return the engine for the next trace; None where none serves."""
        number = route({engine.engine_id: engine.num_outstanding for engine in self if not (engine.is_behind or engine.leaves_for)})
        return None if number is None else self._engines[number]

    def refuse(self, engine: PrmEngine, violation: Violation) -> None:
        """Refuse an answer of an engine for its violation."""
        self._peers.refuse(engine.peer, violation)

    def send(self, engine: PrmEngine, message: TraceTokens | Cancel) -> None:
        """Send a message. Where that fails, the engine's traces count as lost: at once where another engine takes them, else once it is
        heard from again.
        """
        if self._peers.send(engine.peer, message):
            return
        engine.is_behind = True
        if self.least_busy() is not None:
            self._on_lost(engine, True)

    def leave(self, engine_id: int, reason: str) -> None:
        """Give an engine no new traces, as it is to leave; with an empty reason, give it some again, as it stays."""
        if (engine := self.find(engine_id)) is not None:
            engine.leaves_for = reason
            self._on_room()

    def dismiss(self, engine_id: int, reason: str) -> None:
        """Let go of an engine that is to leave, or is given up: its traces begin anew in others, and it is told to end."""
        engine = self._engines.pop(engine_id, None)
        if engine is not None:
            self._forget(engine, has_died=False)
        self._tell_to_end(f"{self._peers.role}-{engine_id}", reason)
        self.changed.set()

    def lost(self, engine_id: int, reason: str) -> None:
        """Note that an engine will not serve any more, though nobody asked it to leave."""
        self.membership.lost(engine_id, reason)
        self.dismiss(engine_id, reason)

    def _on_ready(self, peer: str, ready: PrmReady) -> None:
        number = number_of(peer)
        if number not in self.membership.names:
            words = f"PrmReady of {peer}, which is no engine of the process reward model: others score steps"
            self._peers.refuse(peer, Violation(kind=Kind.IDENTITY, words=words))
            return
        before = self._engines.get(number)
        if before is not None and before.process_id == ready.process_id:
            return
        if not self.membership.is_meant(number, request_id=ready.request_id):
            self._peers.send(peer, Stop(reason=f"another process is {peer} now, or is to be"))
            if before is None:  # else its silence tells that it has lost its connection to this one
                self._peers.forget(peer)
            return
        if not self.membership.may_join(number):
            self.membership.ended(number)
            self.dismiss(number, f"{peer} is not one of the process reward model's engines that the run has now (`pipelinerl scale`)")
            return
        self._engines[number] = PrmEngine(engine_id=number, peer=peer, process_id=ready.process_id)
        if before is not None:
            self.membership.ended(number)
            self._forget(before, has_died=True)
        self.membership.joined(number)
        self._serve_again()
        self.changed.set()

    def _on_load(self, peer: str, load: PrmLoad) -> None:
        engine = self.find(number_of(peer))
        if engine is None:
            if self.membership.state(number_of(peer)) in (State.LEFT, State.LOST):
                self._tell_to_end(peer, "the run has gone on without it")
            return
        if (violation := gauges(load)) is not None:
            self._peers.refuse(peer, violation)
            return
        engine.load = load
        if engine.is_behind:
            engine.is_behind = False
            self._on_lost(engine, True)
            self._serve_again()

    def _serve_again(self) -> None:
        """Have traces begin that no engine has, and those of engines that cannot be reached: there is one that serves."""
        for engine in list(self):
            if engine.is_behind:
                self._on_lost(engine, True)
        self._on_room()

    def _on_silent(self, peer: str, words: str) -> bool:
        """Give up an engine that has joined and has fallen silent; return False for one without which the run does not go on."""
        number = number_of(peer)
        is_leaving = self.membership.state(number) in (State.DRAINING, State.LEFT, State.LOST)
        if number not in self.membership.names or not (is_leaving or self.membership.may_be_lost(number)):
            return False
        self.lost(number, words)
        return True

    def _on_rejected(self, peer: str, is_banned: bool) -> None:
        """Go on without an engine that has joined and keeps committing violations."""
        if is_banned and self.membership.may_be_lost(number_of(peer)):
            self.lost(number_of(peer), "it kept saying what cannot be")

    def _forget(self, engine: PrmEngine, *, has_died: bool) -> None:
        if engine.load is not None:
            self._gone = msgspec.structs.replace(_sum_of(self._gone, engine.load), num_traces=0)
        self._on_lost(engine, has_died)

    def _tell_to_end(self, peer: str, reason: str) -> None:
        self._peers.send(peer, Stop(reason=reason))
        self._peers.forget(peer)


def _sum_of(*loads: PrmLoad) -> PrmLoad:
    """Return the gauges of several engines as those of one, with the first's number."""
    names = [name for name in PrmLoad.__struct_fields__ if name != "prm_id"]
    return msgspec.structs.replace(loads[0], **{name: sum(getattr(load, name) for load in loads) for name in names})
