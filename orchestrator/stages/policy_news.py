"""What weight sync tells the trainer of its policies: which buffers no engine reads, and what all engines hold."""

from __future__ import annotations

import asyncio
import dataclasses

from orchestrator.peers.peers import Peers
from orchestrator.rules.swaps import Swaps
from pipelinerl.messages import PolicyHeld, WeightBufferReleased


@dataclasses.dataclass(slots=True, kw_only=True)
class PolicyNews:
    """Tells the trainer once for all messages that arrive together, since each time every engine is looked at."""

    trainer: Peers
    swaps: Swaps
    _told: PolicyHeld | None = dataclasses.field(default=None, init=False)
    """The last message about what all engines hold; None before the first, while the trainer assumes nothing."""
    _is_due: asyncio.Event = dataclasses.field(default_factory=asyncio.Event, init=False)
    """Set where buffers may be free, or engines hold another policy. A trainer that has not published needs to know neither."""

    def note(self) -> None:
        """Note that there may be something to tell."""
        self._is_due.set()

    def forget(self) -> None:
        """Note that another trainer starts, which was told nothing."""
        self._told = None

    async def run(self) -> None:
        """Tell until cancelled."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            if self.swaps.newest is not None:
                self._tell()

    def _tell(self) -> None:
        for buffer in self.swaps.take_free_buffers():
            self.trainer.send("trainer-0", WeightBufferReleased(buffer=buffer))
        held = PolicyHeld(version=self.swaps.held_by_all(), rollback_epoch=self.swaps.rollback_epoch)
        if held != (self._told or PolicyHeld(version=None, rollback_epoch=held.rollback_epoch)):
            self.trainer.send("trainer-0", held)
        self._told = held
