"""The process reward model as the orchestrator knows it: one process on the scorers' hub, asked in chunks, replaced when it is killed."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.peers.peers import Peers
from orchestrator.rules.validation.announcements import gauges
from orchestrator.rules.validation.violations import Kind, Violation, number_of
from pipelinerl.messages import Cancel, PrmLoad, PrmReady, StepsScored, TraceTokens
from pipelinerl.runtime.stage import Signal

PRM_NUMBER = 1
"""The number of the process reward model among the scorers: it comes after those that run reward functions."""


class Prm:
    """The process reward model's connection. It sends traces, and reports when the model has lost them: all are then to be sent again."""

    def __init__(self, peers: Peers, *, is_episodic: bool = False) -> None:
        self.is_episodic = is_episodic
        """True in a run with an environment: an episode is sent once it is over, and its steps are its turns."""
        self.load: PrmLoad | None = None
        """Its last gauges; None before the first."""
        self._peers = peers
        self._peer = ""
        self._process_id: int | None = None
        self._changed = Signal()
        self._is_behind = False
        """True where something could not be sent."""
        self._on_lost: Callable[[], None] = lambda: None
        peers.on(PrmReady, self._on_ready)
        peers.on(PrmLoad, self._on_load)

    async def wait_until_ready(self) -> None:
        """Wait until it has announced itself."""
        while self._process_id is None:
            await self._changed.wait()

    def on_scored(self, handler: Callable[[StepsScored], None]) -> None:
        """Have `handler` called with every answer."""

        def on_scored(peer: str, scored: StepsScored) -> None:
            if peer == self._peer:
                handler(scored)
            else:
                words = f"StepsScored of rollout {scored.rollout_id[:100]}, of {peer}, which follows no trace"
                self._peers.refuse(peer, Violation(kind=Kind.UNASKED, words=words))

        self._peers.on(StepsScored, on_scored)

    def on_lost(self, handler: Callable[[], None]) -> None:
        """Have `handler` called when the model has lost all traces, and can be asked again."""
        self._on_lost = handler

    def refuse(self, violation: Violation) -> None:
        """Refuse an answer of the model for its violation."""
        self._peers.refuse(self._peer, violation)

    def send(self, message: TraceTokens | Cancel) -> None:
        """Send a message. Where that fails, the model's traces count as lost once it is heard from again."""
        if not self._peers.send(self._peer, message):
            self._is_behind = True

    def _on_ready(self, peer: str, ready: PrmReady) -> None:
        if number_of(peer) != PRM_NUMBER:
            words = f"PrmReady of {peer}, expected scorer-{PRM_NUMBER}: it is another that scores steps"
            self._peers.refuse(peer, Violation(kind=Kind.IDENTITY, words=words))
            return
        is_new = self._process_id is not None and self._process_id != ready.process_id
        self._peer, self._process_id = peer, ready.process_id
        self._changed.set()
        if is_new:
            self._lose()

    def _on_load(self, peer: str, load: PrmLoad) -> None:
        if peer != self._peer:
            return
        if (violation := gauges(load)) is not None:
            self._peers.refuse(peer, violation)
            return
        self.load = load
        if self._is_behind:
            self._lose()

    def _lose(self) -> None:
        self._is_behind = False
        self._on_lost()
