"""A journal's segment shrinks as it ages: lines that nobody looks at after the fact are thinned, the rest is written shorter, and all of it
is compressed. A run of 30 days keeps every step, swap, sample, alarm and evaluation, in a tenth of the bytes.

- gauges (`status`, `load`): one of each process in `GAUGES_EVERY_S` stays;
- spans: the seconds of each lane and kind of work become one line of kind `work` for each `WORK_S`;
- figures of a step are rounded to `DIGITS` significant digits.

A line that goes leaves an empty one, so that the others keep their numbers. The compressed segment is on the disk whole before the plain
one goes: a process that is killed in between leaves both, and its next start removes the plain one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipelinerl.observe.lines import KIND_WITHIN, SPAN
from pipelinerl.observe.segments import closed_numbers, closed_path, compressed_path

GAUGES_EVERY_S = 5.0
"""Pause between two gauges that stay: two lie within the window over which rates are told (`fold.state.WINDOW_S`)."""
WORK_S = 60.0
"""Seconds that one line of `work` sums up; the report's overview of a run of days has bins of many minutes."""
DIGITS = 7
"""A float32, which most of them were, has as many."""
_GAUGES, _STEP = (b'"kind": "status"', b'"kind": "load"'), b'"kind": "step"'
_EMPTY = b"\n"


def compact_closed(journal: Path, *, keep_newest: bool = True) -> None:
    """Compact every closed segment of a journal, the newest one excepted. A disk that takes no more leaves them as they are."""
    numbers = closed_numbers(journal)
    with contextlib.suppress(OSError):
        for number in numbers[:-1] if keep_newest else numbers:
            compact(closed_path(journal, number), compressed_path(journal, number))


def compact(plain: Path, compressed: Path) -> None:
    """Make a closed segment small, whole or not at all. Nothing to do is no error: it may have been done before."""
    if not plain.exists():
        return
    if not compressed.exists():
        unfinished = compressed.with_suffix(".unfinished")
        with open(plain, "rb") as lines, open(unfinished, "wb") as file:
            with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=6, mtime=0) as packed:
                packed.writelines(thinned(lines))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(compressed)
        _sync(compressed.parent)
    plain.unlink()


def thinned(lines: Iterable[bytes]) -> list[bytes]:
    """Thin the lines; a line that goes becomes an empty one. A line that cannot be read stays as it is, and its reader counts it."""
    kept: list[bytes] = []
    next_gauges_t = dict.fromkeys(_GAUGES, float("-inf"))
    work: dict[tuple[str, str], _Work] = {}
    for at, raw in enumerate(lines):
        kept.append(raw)
        kind = next((kind for kind in (*_GAUGES, SPAN, _STEP) if kind in raw[:KIND_WITHIN]), None)
        line = _decode(raw) if kind is not None else None
        if kind is None or line is None:
            continue
        if kind == _STEP:
            kept[at] = _encode({**_rounded(line), "t": line["t"]})
        elif kind == SPAN:
            _add(line, at, work=work, kept=kept)
        elif line["t"] >= next_gauges_t[kind]:
            next_gauges_t[kind] = line["t"] + GAUGES_EVERY_S
        else:
            kept[at] = _EMPTY
    for each in work.values():
        kept[each.at] = _encode(each.line)
    return kept


@dataclasses.dataclass(slots=True)
class _Work:
    """Spans of one lane and name so far."""

    at: int
    """Place of the last of them, where their sum will stand."""
    line: dict[str, Any]


def _add(span: dict[str, Any], at: int, *, work: dict[tuple[str, str], _Work], kept: list[bytes]) -> None:
    """Add a span to the work of its lane and name, and write down what was summed before, where that covers `WORK_S`."""
    try:
        key, start, end, count = (span["lane"], span["name"]), float(span["start"]), float(span["end"]), int(span.get("count", 1))
    except (KeyError, TypeError, ValueError):
        return
    current = work.get(key)
    if current is not None and end - current.line["start"] > WORK_S:
        kept[work.pop(key).at] = _encode(current.line)
        current = None
    kept[at] = _EMPTY
    if current is None:
        work[key] = _Work(at, {**span, "kind": "work", "busy_s": end - start})
        return
    current.at = at
    before = current.line
    before |= {"t": span["t"], "end": max(before["end"], end), "count": before["count"] + count, "busy_s": before["busy_s"] + end - start}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return value


def _encode(line: dict[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"


def _decode(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and type(line.get("t")) in (int, float) else None


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
