"""A run as a Chrome trace: ui.perfetto.dev or chrome://tracing opens it, without a server.

Lanes: every engine, scoring slot and trainer rank, with what it worked on. Marks: swaps (with their pause) and steps. Counters: queues,
sequences in engines, reward. Times are microseconds since the run began. Written as a stream, gzipped: a run of days fits in memory.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelinerl.errors import DataError
from pipelinerl.observe.fold.rows import StatusRow, StepRow, SwapRow, row_of
from pipelinerl.observe.lines import JournalTail, read_spans
from pipelinerl.observe.renamed import Line
from pipelinerl.observe.segments import journal_folder

Event = dict[str, Any]

_PROCESSES = {"engine": 1, "scorer": 2, "trainer": 3, "run": 4}
_TITLES = {"engine": "engines", "scorer": "scoring", "trainer": "trainer", "run": "run"}


def write_trace(run_folder: Path, *, path: Path | None = None) -> Path:
    """Write `trace.json.gz` into a run's folder, or to `path`, whole or not at all, and return where it is."""
    began = next((line["t"] for line in JournalTail(run_folder).new_lines()), None)
    if began is None:
        raise DataError(f"nothing recorded yet in {journal_folder(run_folder)}: try again once the run has begun")
    path = path or run_folder / "trace.json.gz"
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    with gzip.open(unfinished, "wt", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        first = True
        for event in events(run_folder, began=began):
            file.write(("" if first else ",\n") + json.dumps(event, separators=(",", ":")))
            first = False
        file.write("\n]}\n")
    unfinished.replace(path)
    return path


def events(run_folder: Path, *, began: float) -> Iterator[Event]:
    """Every event of a run: names of lanes first, then the spans, then marks and counters."""
    lanes: dict[str, tuple[int, int]] = {}
    for kind, number in _PROCESSES.items():
        yield _name("process_name", number, 0, _TITLES[kind])
    for span in read_spans(run_folder):
        if span.lane not in lanes:
            process = _PROCESSES.get(span.lane.split("-")[0], _PROCESSES["run"])
            lanes[span.lane] = process, len(lanes) + 1
            yield _name("thread_name", *lanes[span.lane], span.lane)
        process, thread = lanes[span.lane]
        start, length = _us(span.start - began), _us(span.end - span.start)
        facts = {} if span.busy_s is None else {"args": {"busy_s": span.busy_s, "spans": "summed up, as the run went on for long"}}
        yield {"name": span.name, "ph": "X", "ts": start, "dur": length, "pid": process, "tid": thread, **facts}
    for line in JournalTail(run_folder).new_lines():
        yield from _of_line(line, lanes, began=began)


def _of_line(line: Line, lanes: dict[str, tuple[int, int]], *, began: float) -> Iterator[Event]:
    at = _us(line["t"] - began)
    match row_of(line):
        case SwapRow() as swap if swap.engine_id >= 0:
            process, thread = lanes.get(f"engine-{swap.engine_id}", (_PROCESSES["engine"], 0))
            facts = {"pause_s": swap.pause_s, "stage_s": swap.stage_s, "sequences": swap.num_running}
            yield {"name": f"swap to v{swap.version}", "ph": "i", "s": "t", "ts": at, "pid": process, "tid": thread, "args": facts}
        case StepRow() as step:
            yield {"name": f"step {step.step} trained", "ph": "i", "s": "g", "ts": at, "pid": _PROCESSES["run"], "tid": 0}
            yield from _counter("reward", at, {"mean": step.reward_mean})
        case StatusRow() as row:
            yield from _counter("queues", at, {name: queue.items for name, queue in row.queues.items()})
            yield from _counter("sequences", at, {f"engine {engine.engine_id}": engine.num_running for engine in row.engines})
        case _:
            pass


def _counter(name: str, at: float, values: dict[str, float | None]) -> Iterator[Event]:
    known = {key: value for key, value in values.items() if value is not None}
    if known:
        yield {"name": name, "ph": "C", "ts": at, "pid": _PROCESSES["run"], "tid": 0, "args": known}


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 1)
