"""What every kind of peer has in common for the orchestrator: it announces itself, it is heard of, and it may fall silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pipelinerl.errors import PeerGone, PeerRefused, PeerSilent
from pipelinerl.messages import Failed, Message, Starting, Stop
from pipelinerl.transport.base import Hub

Handler = Callable[[str, Any], None]
"""Takes a peer's name and its message; never waits."""


class Peers:
    """The peers on one hub: hands each message to the handler of its type and watches for silence.

    One that was heard of and is not for `silent_after_s` (one that starts again: for `ready_deadline_s`) is fenced, and whoever can is
    asked to replace its process.

    Raises `PeerRefused` with a peer's own words when it fails, `PeerSilent` when one that fell silent was not replaced within
    `ready_deadline_s`, or cannot be, or when fewer than `expected` have announced themselves after `ready_deadline_s`.
    """

    def __init__(
        self,
        hub: Hub,
        *,
        role: str,
        expected: int,
        ready_deadline_s: float,
        silent_after_s: float,
        replace: Callable[[str, int], None] | None = None,
    ) -> None:
        """`replace(peer, process_id)` has a silent peer's process killed, so that another takes its place; None where nobody can."""
        self.hub = hub
        self.role = role
        self.is_expected_to_end = False
        """True once the run ends: silence is then no fault."""
        self._handlers: dict[type[Message], Handler] = {Failed: _raise_failed}
        self._expected = expected
        self._ready_deadline_s = ready_deadline_s
        self._silent_after_s = silent_after_s
        self._replace = replace
        self._heard_at: dict[str, float] = {}
        self._process_ids: dict[str, int] = {}
        """As peers have said them."""
        self._silent: set[str] = set()
        """Peers whose replacement was asked for."""
        self._starting: set[str] = set()
        """Peers that load, and have nothing to say meanwhile."""
        self._gone: set[str] = set()
        """Peers that could not be sent to, and were not heard of since."""
        self._all_heard = asyncio.Event()

    def on(self, message_type: type[Message], handler: Handler) -> None:
        """Have messages of one type handled by `handler`."""
        self._handlers[message_type] = handler

    def send(self, peer: str, message: Message) -> bool:
        """Send, unless the connection is closed; then False: the process has ended, and another will announce itself under its name."""
        try:
            self.hub.send(peer, message)
        except PeerGone:
            self._gone.add(peer)
            return False
        return True

    def is_reachable(self, peer: str) -> bool:
        """False from a failed send until the peer is heard of again."""
        return peer not in self._gone

    def dismiss(self, stop: Stop) -> None:
        """Tell every peer to end, also one whose process is only being replaced. Silence is no fault from now on."""
        self.is_expected_to_end = True
        self.hub.dismiss(stop)

    async def run(self) -> None:
        """Receive and watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive())
            group.create_task(self._watch())

    async def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for peer, message in await self.hub.receive():
                self._heard_at[peer] = loop.time()
                self._gone.discard(peer)
                self._silent.discard(peer)
                self._process_ids[peer] = getattr(message, "process_id", self._process_ids.get(peer, 0))
                (self._starting.add if isinstance(message, Starting) else self._starting.discard)(peer)
                self._handlers[type(message)](peer, message)
            if len(self._heard_at) >= self._expected:
                self._all_heard.set()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._ready_deadline_s):
                await self._all_heard.wait()
        except TimeoutError:
            missing = [name for i in range(self._expected) if (name := f"{self.role}-{i}") not in self._heard_at]
            raise PeerSilent(
                f"waited {self._ready_deadline_s:g} s for {', '.join(missing)} to start; see the logs in the run folder"
            ) from None
        while True:
            await asyncio.sleep(self._silent_after_s / 4)
            for peer, heard_at in self._heard_at.items():
                limit_s = self._ready_deadline_s if peer in self._starting else self._silent_after_s
                self._look_at(peer, silence_s=loop.time() - heard_at, limit_s=limit_s)

    def _look_at(self, peer: str, *, silence_s: float, limit_s: float) -> None:
        if silence_s <= limit_s or self.is_expected_to_end:
            return
        process_id = self._process_ids.get(peer, 0)
        if self._replace is None or not process_id:
            raise PeerSilent(f"{peer} was last heard {silence_s:.0f} s ago; the limit is {limit_s:g} s")
        if silence_s > limit_s + self._ready_deadline_s:
            raise PeerSilent(
                f"{peer} was last heard {silence_s:.0f} s ago; the limit is {limit_s:g} s, and nobody took its place in the"
                f" {self._ready_deadline_s:g} s since. See the launcher's log"
            )
        if peer not in self._silent:
            self._silent.add(peer)
            self._gone.add(peer)
            self._replace(peer, process_id)


def _raise_failed(peer: str, failed: Failed) -> None:
    raise PeerRefused(f"{peer} failed: {failed.error}")
