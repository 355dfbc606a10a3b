"""The loop of a tracker: the orchestrator's journal -> names -> one destination.

The journal's line number is the only cursor: a destination says which line it has already, so nothing is lost and nothing sent twice,
even where a process was killed in between. A destination that raises is closed and opened again, after a pause that grows.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pipelinerl.observe.lines import decode
from pipelinerl.observe.renamed import Line
from pipelinerl.observe.report.samples import Decoder, ShownSample, shown_sample
from pipelinerl.observe.segments import SegmentReader
from pipelinerl.observe.tracking.names import Namer, Point

LOOK_EVERY_S = 1.0
"""Pause between two looks at the journal. Twice the pause between two gauges; nobody looks at a tracker more often."""
FIRST_RETRY_S = 5.0
LAST_RETRY_S = 300.0
"""Pause before a destination that failed is opened again: doubled each time, from the first to the last."""

log = logging.getLogger(__name__)


class Destination(Protocol):
    """The place where points go. It may raise anything at any time; it is then closed and opened again."""

    first_line: int
    """Journal lines before this one are there already."""

    def take(self, point: Point) -> None:
        """Add numbers."""
        ...

    def take_samples(self, line: int, samples: list[ShownSample]) -> None:
        """Add a table of samples of one step; `line` is that of the last of them."""
        ...

    def close(self, *, has_ended: bool) -> None:
        """Hand on what is still held; `has_ended`: the run came to its end, and was not cut off."""
        ...


Open = Callable[[Line], Destination]
"""Opens a destination, given the journal's `run` line."""


def follow(run_folder: Path, open_destination: Open, *, until: threading.Event) -> bool:
    """Feed a destination until `until` is set, and then the rest of the journal. Returns whether everything has been handed over."""
    retry_s = FIRST_RETRY_S
    while True:
        feed = _Feed(run_folder, open_destination)
        try:
            feed.run(until)
            return True
        except Exception as error:  # the boundary to code that is not ours: a tracker's failure is a line in its log
            log.warning("%s: %s; %s", type(error).__name__, error, "given up" if until.is_set() else f"trying again in {retry_s:g} s")
            with contextlib.suppress(Exception):
                feed.close()
        if until.is_set():
            return False
        until.wait(retry_s)
        retry_s = min(2 * retry_s, LAST_RETRY_S)


class _Feed:
    """One destination, from its opening to its end or its failure."""

    def __init__(self, run_folder: Path, open_destination: Open) -> None:
        self._run_folder = run_folder
        self._open = open_destination
        self._reader = SegmentReader(run_folder / "journal" / "orchestrator.jsonl")
        self._namer = Namer()
        self._destination: Destination | None = None
        self._decoder: Decoder | None = None
        self._samples: list[ShownSample] = []
        self._samples_line = 0
        self._last_kind = ""

    def run(self, until: threading.Event) -> None:
        while True:
            is_last = until.is_set()
            for raw in self._reader.new_lines():
                if (line := decode(raw)) is not None:
                    self._take(self._reader.number - 1, line)
            if is_last:
                self._hand_over_samples()
                self.close()
                return
            until.wait(LOOK_EVERY_S)

    def close(self) -> None:
        destination, self._destination = self._destination, None
        if destination is not None:
            destination.close(has_ended=self._last_kind == "end")

    def _take(self, number: int, line: Line) -> None:
        self._last_kind = line["kind"]
        if self._destination is None:
            if line["kind"] != "run":
                return
            self._destination = self._open(line)
            self._decoder = Decoder(self._run_folder, (line.get("config") or {}).get("model", {}).get("path"))
        is_new = number >= self._destination.first_line
        if line["kind"] == "sample" and self._decoder is not None and line.get("status", "trained") == "trained":
            if is_new:
                self._samples.append(shown_sample(line, self._decoder))
                self._samples_line = number
        else:
            self._hand_over_samples()
        for point in self._namer.points(number, line):
            if is_new:
                self._destination.take(point)

    def _hand_over_samples(self) -> None:
        """Samples of a step stand together in the journal; what comes after them closes their table."""
        if self._samples and self._destination is not None:
            self._destination.take_samples(self._samples_line, self._samples)
            self._samples = []
