"""The gauges of the moment, written twice a second: the live view and the report read from them which stage waits for which."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec

from orchestrator.ledger.ledger import Ledger
from orchestrator.observe.progress import Progress
from orchestrator.peers.engines import Engines
from orchestrator.peers.scorers import Scorers
from orchestrator.rules.admission import Admission
from orchestrator.rules.membership import Membership
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.membership import State
from pipelinerl.runtime.stage import Channel
from pipelinerl.runtime.watch import Watch

EVERY_S = 0.5
"""Seconds between two lines. A shorter time makes the journal grow; a longer one makes the live view lag."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Writes `status` lines until cancelled, and flushes the ledger beside them."""

    journal: Journal
    ledger: Ledger
    admission: Admission
    engines: Engines
    memberships: tuple[Membership, ...]
    """Of the engines, of those of the process reward model, and of the processes of reward models."""
    scorers: Scorers
    channels: list[Channel[Any]]
    refused: Callable[[], dict[str, int]]
    """The callback counts what was turned away, by reason."""
    watch: Watch
    progress: Progress
    num_steps: int
    num_booked: Callable[[], int]
    """The callback returns how many steps are done."""
    prm: Callable[[], dict[str, Any] | None] = lambda: None
    """The callback returns the gauges of the process reward model; None in a run without one."""
    environment: Callable[[], dict[str, Any] | None] = lambda: None
    """The callback returns the gauges of the environment; None in a run without one."""
    gateway: Callable[[], dict[str, Any] | None] = lambda: None
    """The callback returns the gauges of the gateway and its leases; None in a run without one."""

    dispatch: Callable[[], dict[str, float] | None] = lambda: None
    """The callback returns what the rules of dispatch have done; None in a run without them."""

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self.journal.write("status", **self.gauges(now_s=loop.time()))
            await loop.run_in_executor(None, self.ledger.flush)
            await asyncio.sleep(EVERY_S)

    def gauges(self, *, now_s: float) -> dict[str, Any]:
        """Return all gauges of this moment, as plain values."""
        rollouts = self.ledger.counts()
        if not rollouts.holds:
            raise RuntimeError(f"conservation is broken: {rollouts}")
        last = self.progress.last_step
        return {
            "version": self.admission.version,
            "step": self.num_booked(),
            "num_steps": self.num_steps,
            "groups_running": self.admission.running,
            "groups_accepted": self.admission.accepted,
            "max_running": self.admission.max_running,
            "rollouts": dataclasses.asdict(rollouts),
            "reasons": dict(self.ledger.reasons),
            "generated_tokens": self.engines.num_tokens,
            "trained_tokens": self.progress.num_trained_tokens,
            "engines": [_plain(engine.load) for engine in self.engines if engine.load],
            "members": [
                {"engine_id": one.engine_id, "of": str(membership.kind), "state": str(one.state), "reason": one.reason}
                for membership in self.memberships
                for one in membership.record().members
                if one.state not in (State.LIVE, State.LEFT)
            ],
            "scorers": [_plain(scorer.load) for scorer in self.scorers if scorer.load],
            "prm": self.prm(),
            "environment": self.environment(),
            "gateway": self.gateway(),
            "dispatch": self.dispatch(),
            "queues": {
                channel.name: {
                    "items": len(channel),
                    "bytes": channel.num_bytes,
                    "bound_bytes": channel.bound_bytes,
                    "num_items_total": channel.num_items_ever,
                }
                for channel in self.channels
            },
            "refused": self.refused(),
            "waits": [{"stage": wait.stage, "what": wait.what, "seconds": now_s - wait.since} for wait in self.watch.waits()],
            "waited_s": self.watch.all_waited_s(),
            "reward_mean": last.get("reward_mean"),
            "staleness_mean": last.get("staleness_mean"),
            "staleness_max": last.get("staleness_max"),
            "last_pause_s": self.progress.last_pause_s,
            "elapsed_s": now_s - self.progress.started_s,
            "memory_bytes": _resident_bytes(),
        }


def _plain(value: Any) -> Any:
    """Return a message as JSON values, messages inside it too."""
    if isinstance(value, msgspec.Struct):
        return {field: _plain(getattr(value, field)) for field in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


def _resident_bytes() -> int | None:
    """Return the memory of this process; None where the system does not tell, as without a descriptor to read it by: no gauge ends a
    run.
    """
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096
    except (OSError, ValueError, IndexError):
        return None
