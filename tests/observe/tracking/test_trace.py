"""The Chrome trace: every span on its lane, in microseconds since the run began."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path

import pytest

from pipelinerl.errors import DataError
from pipelinerl.observe.journal import Journal
from pipelinerl.observe.tracking.trace import write_trace
from tests.observe.report.synthetic import Plan, write_run


def test_spans_marks_and_counters_stand_where_the_journal_has_them(tmp_path: Path) -> None:
    lines = write_run(tmp_path, Plan(num_steps=6))
    with gzip.open(write_trace(tmp_path), "rt") as file:
        trace = json.load(file)["traceEvents"]
    spans = [line for line in lines if line["kind"] == "span"]
    drawn = [event for event in trace if event["ph"] == "X"]
    assert len(drawn) == len(spans)
    began = min(line["t"] for line in lines)
    starts = sorted(round(1e6 * (span["start"] - began), 1) for span in spans)
    assert sorted(event["ts"] for event in drawn) == starts
    lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert {lanes[event["pid"], event["tid"]] for event in drawn} == {span["lane"] for span in spans}
    assert sum(event["ph"] == "i" and event["name"].startswith("step") for event in trace) == 6
    assert {event["name"] for event in trace if event["ph"] == "C"} == {"reward", "queues", "sequences"}


def test_a_span_is_as_long_as_it_was(tmp_path: Path) -> None:
    with contextlib.closing(Journal(tmp_path, "engine-0")) as journal:
        journal.write("run")
        began = json.loads((tmp_path / "journal" / "engine-0.jsonl").read_text().splitlines()[0])["t"]
        journal.span("engine-0", "forward", start=began + 1.5, end=began + 1.75)
    with gzip.open(write_trace(tmp_path), "rt") as file:
        (span,) = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    assert (span["ts"], span["dur"]) == (pytest.approx(1.5e6, abs=2), pytest.approx(0.25e6, abs=2))


def test_a_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no journal"):
        write_trace(tmp_path)


def test_a_run_that_recorded_nothing_yet_is_told_apart(tmp_path: Path) -> None:
    Journal(tmp_path, "orchestrator").close()
    with pytest.raises(DataError, match="nothing recorded yet"):
        write_trace(tmp_path)
