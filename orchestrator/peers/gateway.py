"""The gateway as the orchestrator knows it: one process, replaced when it is killed, which speaks for agents outside of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from orchestrator.peers.peers import Peers
from orchestrator.rules.validation.announcements import gauges
from orchestrator.rules.validation.violations import Violation
from pipelinerl.messages import GatewayLoad, GatewayReady, Message
from pipelinerl.runtime.stage import Signal

PEER = "gateway-0"

_M = TypeVar("_M", bound=Message)


class Gateway:
    """The gateway's connection."""

    def __init__(self, peers: Peers) -> None:
        self.load: GatewayLoad | None = None
        """Its last gauges; None before the first."""
        self.address = ""
        """URL at which it listens; empty before it has announced itself."""
        self._peers = peers
        self._changed = Signal()
        self._began_anew: Callable[[], None] = lambda: None
        peers.on(GatewayReady, self._on_ready)
        peers.on(GatewayLoad, self._on_load)

    async def wait_until_ready(self) -> None:
        """Wait until it listens."""
        while not self.address:
            await self._changed.wait()

    def on(self, message_type: type[_M], handler: Callable[[_M], object]) -> None:
        """Have messages of one type handled."""

        def on_message(peer: str, message: _M) -> None:
            handler(message)

        self._peers.on(message_type, on_message)

    def on_began_anew(self, handler: Callable[[], None]) -> None:
        """Have `handler` called when a gateway announces itself: nothing that was lent before is with an agent any more."""
        self._began_anew = handler

    def send(self, message: Message) -> bool:
        """Send a message; return False where the gateway is gone."""
        return self._peers.send(PEER, message)

    def refuse(self, violation: Violation) -> None:
        """Refuse a message of the gateway for its violation."""
        self._peers.refuse(PEER, violation)

    def _on_ready(self, peer: str, ready: GatewayReady) -> None:
        self.address = ready.address
        self._began_anew()
        self._changed.set()

    def _on_load(self, peer: str, load: GatewayLoad) -> None:
        if (violation := gauges(load)) is not None:
            self.refuse(violation)
            return
        self.load = load
