"""A run writes about itself in one JSON-lines journal per process, in `<run>/journal/`, local and first.

Terminal, live view, report and trackers read the journals through `lines` and `fold`; nothing else has to be up. Every line has `t`
(Unix seconds), `kind` and `process`.

| kind | written by | fields |
| --- | --- | --- |
| `run` | orchestrator, once | `config` (resolved), `derived`, `machine` (its `cores` and `devices`) |
| `status` | orchestrator, twice a second | gauges of the moment, see `orchestrator.observe.status` |
| `step` | orchestrator, per optimizer step | `step`, `reward_mean`, ..., `staleness` (tokens by versions of age), `trainer` (its metrics) |
| `swap` | orchestrator, per engine and version | `engine_id`, `version`, `pause_s`, `stage_s`, `num_running` |
| `sample` | orchestrator, some of a step | `step`, `status`, `reason`, `prompt`, `columns`, ..., see `orchestrator.observe.sample_log` |
| `evaluation` | orchestrator | `version`, `reward_mean`, `components` (means), `num_prompts`, `oldest_version` |
| `alarm` | orchestrator | `name`, `began` and `step` (where it began and was noticed), `figure`, `change`, `is_over`: see `alarms` |
| `client_step` | a server of clients, per step of theirs | `model_id`, `step`, `staleness`, ..., see `pipelinerl.tinker.provenance` |
| `end` | orchestrator, once | `rollouts` (by how they ended), `reason` |
| `load` | engine, scorer, every second | fields of `messages.EngineLoad` or `ScorerLoad`, with the figures of every reward function |
| `function_error` | orchestrator, at a cause's first failure and when told anew | see `orchestrator.observe.function_errors` |
| `unreadable` | nobody: stands for a damaged line | `line` (its number) |
| `unwritten` | a process that can write again after a full disk | `num_lines` that are missing before it |
| `startup` | every process, once it can work | `what` it did until then, `start`, `end` (Unix seconds) |
| `span` | engine, scorer, trainer | `lane`, `name`, `start`, `end` (Unix seconds), `count` |
| `work` | nobody: stands for spans of long ago | the same, with `busy_s`, their sum |

A journal that has grown to `SEGMENT_BYTES` is closed and begun anew; closed ones are thinned and compressed (`segments`, `thinning`).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelinerl.observe.segments import closed_numbers, closed_path
from pipelinerl.observe.thinning import compact_closed

SEGMENT_BYTES = 16 << 20
"""Size from which on a journal goes on in another file. As much again is kept as it was written, before it is thinned: smaller keeps less
of the last hour whole, larger takes more of each process's disk."""
SPAN_GAP_S = 0.01
"""Work of one name closer together than this is one span. Smaller writes more lines; larger hides short idle times."""
SPAN_MAX_S = 1.0
"""A span is written at the latest after so long, so that a live view sees work under way."""


class Journal:
    """Appends lines to one process's journal. Each line is handed to the system whole, so a killed process loses none before it.

    A line that cannot be written, as on a full disk, is counted and left out: a run does not end for want of its own description.
    """

    def __init__(
        self, run_folder: Path, process: str, *, clock: Callable[[], float] = time.time, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        folder = run_folder / "journal"
        folder.mkdir(parents=True, exist_ok=True)
        self.process = process
        self.clock = clock
        """Unix seconds; in a simulation those of its loop."""
        self._path = folder / f"{process}.jsonl"
        self._segment_bytes = segment_bytes
        self._compacting: threading.Thread | None = None
        self._open()
        self._num_unwritten = 0
        self._is_torn = False
        """The last line was written in part."""
        self._open_spans: dict[tuple[str, str], list[float]] = {}

    def write(self, kind: str, **fields: Any) -> None:
        """Append one line; `fields` are plain JSON values."""
        if self._num_unwritten and self._append("unwritten", {"num_lines": self._num_unwritten}):
            self._num_unwritten = 0
        if self._num_unwritten or not self._append(kind, fields):
            self._num_unwritten += 1

    def span(self, lane: str, name: str, *, start: float, end: float, count: int = 1) -> None:
        """Record work on a lane from `start` to `end` (Unix seconds), joined with the work of that name just before it."""
        key = (lane, name)
        current = self._open_spans.get(key)
        if current is not None and start - current[1] <= SPAN_GAP_S and end - current[0] <= SPAN_MAX_S:
            current[1] = end
            current[2] += count
            return
        if current is not None:
            self._write_span(key, current)
        self._open_spans[key] = [start, end, count]

    def close(self) -> None:
        """Write the spans still open and close the file."""
        for key, current in self._open_spans.items():
            self._write_span(key, current)
        self._open_spans.clear()
        self._file.close()
        if self._compacting is not None:
            self._compacting.join()
            compact_closed(self._path)  # what was closed while it worked

    def _open(self) -> None:
        """Begin, or go on in, the open segment, and have older ones made small beside: also those of a process that was killed over it."""
        closed = closed_numbers(self._path)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        self._num_bytes = os.fstat(self._file.fileno()).st_size
        self._next_number = max(closed, default=0) + 1
        if len(closed) > 1 and (self._compacting is None or not self._compacting.is_alive()):
            self._compacting = threading.Thread(target=compact_closed, args=(self._path,), name=f"journal {self.process}", daemon=True)
            self._compacting.start()

    def _close_segment(self) -> None:
        """Give the open segment its number and begin the next. A process that is killed in between begins it at its next start."""
        before, closed = self._file, closed_path(self._path, self._next_number)
        try:
            self._path.rename(closed)
        except OSError:
            return  # the disk may take no name: the segment grows on
        try:
            self._open()
        except OSError:  # the process may open no file: likewise, under its own name
            closed.rename(self._path)
        else:
            before.close()

    def _append(self, kind: str, fields: dict[str, Any]) -> bool:
        if self._num_bytes >= self._segment_bytes and not self._is_torn:
            self._close_segment()
        text = json.dumps({"t": self.clock(), "kind": kind, "process": self.process, **fields})
        line = ("\n" * self._is_torn + text + "\n").encode()
        try:
            num_written = self._file.write(line)
        except OSError:
            return False
        self._num_bytes += num_written
        self._is_torn = num_written < len(line)
        return not self._is_torn

    def _write_span(self, key: tuple[str, str], span: list[float]) -> None:
        self.write("span", lane=key[0], name=key[1], start=span[0], end=span[1], count=int(span[2]))
