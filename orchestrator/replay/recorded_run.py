"""A recorded run under replay: the input of every stage, whichever stages are replayed before it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from orchestrator.replay.recorded import Recording, read_recording
from pipelinerl.config import Config
from pipelinerl.errors import LedgerError
from pipelinerl.messages import ScoredTrajectory


@dataclasses.dataclass(slots=True, kw_only=True)
class RecordedRun:
    """The run, and the new results of replayed stages in place of the recorded ones."""

    config: Config
    """The run's settings, some of them changed."""
    run_folder: Path
    folder: Path
    """The folder for the results of the replay."""
    ledger_path: Path
    """The run's own ledger, or the one that batching has written."""
    scored: dict[str, ScoredTrajectory] = dataclasses.field(default_factory=dict)
    """The results of scoring, by rollout; empty where it was not replayed."""
    _recordings: dict[Path, Recording] = dataclasses.field(default_factory=dict)

    @property
    def recording(self) -> Recording:
        """The groups in the ledger. Raises `LedgerError` where there are none."""
        if self.ledger_path not in self._recordings:
            self._recordings = {self.ledger_path: read_recording(self.ledger_path)}
        recording = self._recordings[self.ledger_path]
        if not recording.groups:
            raise LedgerError(f"{self.run_folder} has no recorded group: none was completed yet, or run.record_groups was 0")
        return recording
