"""How many ranks the trainer of a live run has, and how far a change of them is."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRanksRow:
    """The trainer's ranks changed, or are about to."""

    t: float = 0.0
    """Unix seconds."""
    ranks: int = 1
    wanted: int = 1
    before: int = 1
    phase: str = ""
    """settled, saving or starting; see `pipelinerl.runtime.trainer_ranks`."""
    epoch: int = 0
    reason: str = ""
    """Why a change was given up; empty where none was."""

    @property
    def words(self) -> str:
        """What the trainer does, as one says it."""
        given_up = f", since a change was given up: {self.reason}" if self.reason else ""
        match self.phase:
            case "saving":
                return f"the trainer of {_ranks(self.ranks)} is to save, and to go on with {self.wanted}"
            case "starting":
                return f"a trainer of {_ranks(self.ranks)} starts, in place of one of {self.before}{given_up}"
            case _:
                return f"the trainer has {_ranks(self.ranks)}{given_up}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
