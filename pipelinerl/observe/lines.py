"""Journal lines as every reader gets them: whole, decoded, and under today's names (`renamed`).

A half-written line, of a process that was killed or is writing, waits for the next look. A line that cannot be decoded is counted, never
fatal. Journals of days are large, so everything here is a stream.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.observe.renamed import Line, current
from pipelinerl.observe.segments import SegmentReader, journals_of

SPAN, WORK = b'"kind": "span"', b'"kind": "work"'
KIND_WITHIN = 80
"""A line begins with its time and its kind. Spans outnumber everything else, so they are told apart before anything is decoded."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Work on a lane. A long run has more spans than anything else, so lines are decoded into this at once."""

    lane: str
    name: str
    start: float
    """Unix seconds."""
    end: float
    """Unix seconds."""
    count: int = 1
    """Pieces of work that were joined, see `Journal.span`."""
    busy_s: float | None = None
    """Seconds of work between start and end, where many spans are summed up. None for one span, which is work from start to end."""


class JournalTail:
    """Reads the whole lines that a run's journals have gained since the last look."""

    def __init__(self, run_folder: Path) -> None:
        self.folder = run_folder / "journal"
        self.num_unreadable = 0
        """Lines that are not a JSON object with `t` and `kind`."""
        self._readers: dict[Path, SegmentReader] = {}

    def new_lines(self) -> Iterator[Line]:
        """Lines gained since the last call that are not spans, journal by journal. A half-written last line waits for the next call."""
        for raw in self._new():
            if SPAN in raw[:KIND_WITHIN]:
                continue
            line = decode(raw)
            if line is None:
                self.num_unreadable += 1
            else:
                yield line

    def new_spans(self) -> Iterator[Span]:
        """Spans gained since the last call; a tail that gives spans does not give the lines between them."""
        for raw in self._new():
            head = raw[:KIND_WITHIN]
            if (SPAN in head or WORK in head) and (span := span_of(raw)) is not None:
                yield span

    def _new(self) -> Iterator[bytes]:
        for path in journals_of(self.folder):
            yield from self._readers.setdefault(path, SegmentReader(path)).new_lines()


def read_journals(run_folder: Path) -> list[Line]:
    """All lines of all journals of a run, in order of time. A half-written last line is left out."""
    lines = [line for path in journals_of(run_folder / "journal") for line in read_journal(path)]
    return sorted(lines, key=lambda line: line["t"])


def read_journal(path: Path) -> Iterator[Line]:
    """The whole lines of one journal, all its segments. In place of one that is damaged, as after a crash of the machine, comes a line of
    kind `unreadable` with its number: a reader of anything else passes over it, and the rest of the journal is not lost.
    """
    time_s, reader = 0.0, SegmentReader(path)
    for raw in reader.new_lines():
        line = decode(raw) or {"t": time_s, "kind": "unreadable", "process": path.stem, "line": reader.number}
        time_s = line["t"]
        yield line


def read_spans(run_folder: Path) -> Iterator[Span]:
    """Every span of a run, journal by journal, as a stream."""
    return JournalTail(run_folder).new_spans()


def decode(raw: bytes) -> Line | None:
    """One journal line under today's names; None where it is none."""
    line = json_object(raw)
    is_line = line is not None and type(line.get("t")) in (int, float) and math.isfinite(line["t"]) and isinstance(line.get("kind"), str)
    return current(line) if is_line and line is not None else None


def json_object(raw: bytes) -> dict[str, Any] | None:
    """A JSON object; None for anything else. Python writes NaN, which JSON does not know: then its own reader decodes."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError):
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def span_of(raw: bytes) -> Span | None:
    """A line of kind `span`, or of kind `work`, which sums up many; None where it is damaged or its times are missing."""
    try:
        span = _SPANS.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return span if span.end >= span.start else None


_SPANS = msgspec.json.Decoder(Span)
