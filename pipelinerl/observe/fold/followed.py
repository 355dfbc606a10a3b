"""A run's folder, followed: its journals as they grow, and the crash reports of its processes, folded into one state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipelinerl.observe.fold import rows
from pipelinerl.observe.fold.rows import Failure
from pipelinerl.observe.fold.state import RunState
from pipelinerl.observe.lines import JournalTail, json_object
from pipelinerl.observe.renamed import Line


class FollowedRun:
    """The state of a run, brought up to date by `look`."""

    def __init__(self, run_folder: Path, *, began: float = 0.0) -> None:
        """`began`: Unix seconds of the start that is followed; 0: of whatever there is."""
        self.state = RunState()
        self._began = began
        self._run_folder = run_folder
        self._tail = JournalTail(run_folder)

    def look(self) -> list[tuple[Line, rows.Row | None]]:
        """Fold everything written since the last look; return the lines in order of time, each with its row."""
        return list(self.fold_new())

    def fold_new(self) -> Iterator[tuple[Line, rows.Row | None]]:
        """Fold what was written since the last look, line by line, and then the crash reports.

        An end, or a crash, from before the start that is followed counts for nothing: the run goes on.
        """
        for line in sorted(self._tail.new_lines(), key=lambda line: line["t"]):
            is_old_end = line["kind"] == "end" and line["t"] < self._began
            yield line, None if is_old_end else self.state.fold(line)
        self.state.fail([failure for failure in read_failures(self._run_folder) if failure.t >= self._began])


def read_failures(run_folder: Path) -> tuple[Failure, ...]:
    """The crash reports in a run folder, in order of time."""
    records = (json_object(path.read_bytes()) for path in (run_folder / "failures").glob("*.json"))
    return tuple(sorted((rows.read(Failure, record) for record in records if record is not None), key=lambda failure: failure.t))
