"""The rows that a rank is working on are noted in the run folder: a process that is killed can tell nobody.

Whoever takes its place reads what was left and tells the orchestrator, which sends a row no more that was there at two deaths in a row
(`orchestrator.rules.quarantine`). A rank that ends because another did, or because it was told to, leaves nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pipelinerl.errors import MismatchError, PeerError
from pipelinerl.messages import MicroBatch

_FOLDER = "in_progress"
_NOT_THE_ROW = (PeerError, MismatchError)
"""Errors whose cause is another process, or the weights: a row would be blamed for what any other meets, too."""


class RowsInProgress:
    """The rows that one rank is working on. Two threads may hold one each: the one laid out and the one computed."""

    def __init__(self, run_folder: Path, *, rank: int, replica: int, num_replicas: int) -> None:
        self._folder = run_folder / _FOLDER
        self._folder.mkdir(exist_ok=True)
        self._rank = rank
        self._replica = replica
        self._num_replicas = num_replicas

    @contextlib.contextmanager
    def __call__(self, batch: MicroBatch) -> Iterator[None]:
        """Have the row be left noted where the block ends by an error of its own, or with the process."""
        if not batch.rollout_ids:
            yield
            return
        row = batch.index * self._num_replicas + self._replica
        path = self._folder / f"{batch.step}-{row}.{self._rank}"
        path.touch()  # not flushed: it must outlive the process, not the machine
        try:
            yield
        except BaseException as error:
            if isinstance(error, _NOT_THE_ROW) or not isinstance(error, Exception):
                path.unlink(missing_ok=True)
            raise
        path.unlink(missing_ok=True)


def interrupted_rows(run_folder: Path) -> tuple[str, ...]:
    """Return the rows that ranks were working on when they died, as `step/row`; only once."""
    paths = list((run_folder / _FOLDER).glob("*-*.*"))
    for path in paths:
        path.unlink()
    return tuple(sorted({path.name.partition(".")[0].replace("-", "/") for path in paths}))
