"""`python -m scripts.chaos.ranks --run-folder RUN --ranks N`: the trainer without a model, of N replicas, each a thread of this process.

Its steps take `TOKEN_S` for each token of a row, and it tells what the real one tells of its speed.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from pathlib import Path

from pipelinerl.messages import MicroBatch, StepClosed
from pipelinerl.runtime.process import crash_report, die_with_parent
from scripts.chaos.trainer import Rehearsal

TOKEN_S = 2e-3
WAIT_S = 120.0
"""Longest wait of a replica for the others."""


class Meeting:
    """Where replicas meet at the end of a step. When one ends, nobody is awaited any more."""

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self._barrier = threading.Barrier(num_replicas, timeout=WAIT_S)
        self._parts: dict[int, tuple[int, int]] = {}

    def wait(self) -> None:
        """Wait for all of them. Raises `threading.BrokenBarrierError` once one has ended."""
        self._barrier.wait()

    def joined(self, replica: int, part: tuple[int, int]) -> tuple[int, int]:
        """Return the sums of all parts."""
        self._parts[replica] = part
        self.wait()
        num_samples, digest = map(sum, zip(*self._parts.values(), strict=True))
        self.wait()  # before a part of the next step takes the place of this one
        return num_samples, digest

    def end(self) -> None:
        self._barrier.abort()


class Replica(Rehearsal):
    """One of the replicas; the first one speaks and writes for all."""

    def __init__(self, run_folder: Path, *, replica: int, meeting: Meeting) -> None:
        super().__init__(run_folder, replica=replica, num_replicas=meeting.num_replicas)
        self._meeting = meeting
        self._working_s = 0.0

    def _compute(self, row: MicroBatch) -> None:
        seconds = TOKEN_S * len(row.token_ids)
        self._working_s += seconds
        time.sleep(seconds)

    def _joined(self, num_samples: int, digest: int) -> tuple[int, int]:
        return self._meeting.joined(self.replica, (num_samples, digest))

    def _figures(self, closed: StepClosed) -> dict[str, float]:
        working_s, self._working_s = self._working_s, 0.0
        return {"num_tokens": float(closed.num_tokens), "tokens_per_s": closed.num_tokens / working_s if working_s else 0.0}

    def _save(self) -> None:
        self._meeting.wait()
        if self.replica == 0:
            super()._save()
        self._meeting.wait()


def _live(run_folder: Path, replica: int, meeting: Meeting) -> None:
    try:
        with contextlib.suppress(threading.BrokenBarrierError):
            Replica(run_folder, replica=replica, meeting=meeting).run()
    finally:
        meeting.end()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.chaos.ranks", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    given = parser.parse_args()
    die_with_parent()
    with crash_report(given.run_folder, "trainer-0"):
        meeting = Meeting(given.ranks)
        others = [threading.Thread(target=_live, args=(given.run_folder, number, meeting), daemon=True) for number in range(1, given.ranks)]
        for thread in others:
            thread.start()
        _live(given.run_folder, 0, meeting)
        for thread in others:
            thread.join(WAIT_S)


if __name__ == "__main__":
    main()
