"""The checkpoints that a trainer may start from, as the ledger has them: what came before the oldest of them is forgotten."""

from __future__ import annotations

import asyncio
import dataclasses

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.snapshot import commit_of, saved_versions
from orchestrator.rules.validation.trainer import TrainerProgress, checkpoint_saved
from orchestrator.rules.validation.violations import Violation, shorten
from pipelinerl.messages import CheckpointFailed, CheckpointSaved, TrainerReady
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.stage import Signal


@dataclasses.dataclass(slots=True, kw_only=True)
class Checkpoints:
    """The newest checkpoint, and the record of all of them in ledger and journal."""

    ledger: Ledger
    journal: Journal
    newest: int = 0
    """Version of the newest one, also of one that could not be written."""
    changed: Signal = dataclasses.field(default_factory=Signal)
    """Set when the newest one is another."""

    def check(self, said: CheckpointSaved, progress: TrainerProgress) -> Violation | None:
        """Return the violation in a checkpoint that is not of what this ledger has as trained."""
        commit = commit_of(self.ledger, said.version - 1) if 0 < said.version <= progress.num_done else None
        return checkpoint_saved(said, progress, commit=commit)

    def saved(self, said: CheckpointSaved) -> None:
        self.ledger.record_checkpoint(said.version, said.commit, oldest=said.oldest, now_s=_now_s())
        self._write(said.version, num_bytes=said.num_bytes, save_s=said.save_s)
        self.newest = said.version
        self.changed.set()

    def failed(self, said: CheckpointFailed) -> None:
        error = shorten(said.error)
        self.ledger.record("unsaved", now_s=_now_s(), version=said.version, reason=error)
        self._write(said.version, error=error)
        self.newest = said.version
        self.changed.set()

    def go_on_from(self, ready: TrainerReady) -> None:
        """Make the ledger's checkpoints exactly those that a trainer that starts can still use."""
        version = self.newest = ready.version if ready.saved is None else ready.saved
        known = saved_versions(self.ledger)
        reasons = {damage.version: damage.reason for damage in ready.damaged}
        for newer in sorted((one for one in known if one > version), reverse=True):
            reason = reasons.get(newer, "it is not there any more")
            self.ledger.discard_checkpoint(newer, reason, now_s=_now_s())
            self._write(newer, error=f"discarded: {reason}")
            print(f"checkpoint {newer} is discarded: {reason}; version {version} is used, and what came after is trained again", flush=True)
        self.changed.set()
        if version and version not in known:
            self.ledger.record_checkpoint(version, ready.saved_commit or ready.commit, oldest=ready.oldest, now_s=_now_s())

    async def wait_for(self, version: int) -> None:
        """Wait until a version is written, or has failed to be."""
        while self.newest < version:
            await self.changed.wait()

    def _write(self, version: int, *, num_bytes: int = 0, save_s: float = 0.0, error: str = "") -> None:
        self.journal.write("checkpoint", version=version, num_bytes=num_bytes, save_s=save_s, error=error)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
