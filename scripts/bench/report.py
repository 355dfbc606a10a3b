#!/usr/bin/env python
"""Measures the time and memory of a report at 1,000 / 10,000 / 100,000 steps, and what a journal of 30 days takes on the disk.

Journals as the demo writes them (`scripts/bench/demo_journal.py`), written by the class that every process uses, so long ones lie there in
thinned and compressed segments. Each report is written by a process of its own; of short runs twice, and the faster one counts.

- seconds by the clock, and on a processor, of which a report uses one: much apart, the machine has other work, and this says little;
- linear: processor seconds per step of the longest run over those of the next one; start-up taken off;
- 30 days of the demo's pace: the bytes that each aged step takes, times the steps of 30 days, and what every process keeps whole.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipelinerl.observe.journal import SEGMENT_BYTES
from pipelinerl.observe.segments import compressed_path, journals_of
from pipelinerl.observe.thinning import compact
from scripts.bench import harness
from scripts.bench.demo_journal import STEPS_PER_S, DemoJournals

DAYS = 30
PROCESSES = 4
AGED_STEPS = 1_500
"""For the bytes of a step that has aged: about as many as a segment of the orchestrator holds."""
_WRITE = """
import json, resource, sys, time
from pathlib import Path
began = time.perf_counter()
from pipelinerl.observe.report import write_report
if sys.argv[1] != "-":
    write_report(Path(sys.argv[1]))
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))
"""


def measure(arguments: Any) -> harness.Measured:
    lengths = (1_000, 10_000) if arguments.quick else (1_000, 10_000, 100_000)
    _, start_s, start_mib = _report("-")
    rows: list[harness.Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for num_steps in lengths:
            run = Path(folder) / str(num_steps)
            write_s, _ = harness.median_s(DemoJournals(run, num_steps=num_steps).write, repetitions=1)
            reports = [harness.steadily(lambda run=str(run): _report(run)) for _ in range(1 if num_steps > 10_000 else 2)]
            seconds, worked_s, mib = min(reports)
            rows.append(
                {
                    "steps": num_steps,
                    "journal MB": sum(path.stat().st_size for path in (run / "journal").iterdir()) / 1e6,
                    "written in s": write_s,
                    "report s": seconds,
                    "processor s": worked_s,
                    "peak MiB": mib,
                    "ms a step": 1e3 * (worked_s - start_s) / num_steps,
                    "page MB": (run / "report.html").stat().st_size / 1e6,
                }
            )
        aged = aged_bytes(Path(folder) / "aged")
    month_steps = DAYS * 86400 * STEPS_PER_S
    month_gb = month_bytes_of(aged) / 1e9
    unthinned = 1e6 * rows[0]["journal MB"] / rows[0]["steps"]  # the shortest run has thinned nothing
    shorter, longest = rows[-2:]
    return harness.Measured(
        rows=rows,
        goals=[
            harness.at_most(
                f"ms a step, {lengths[-1]:,} steps over {lengths[-2]:,}",
                longest["ms a step"] / shorter["ms a step"],
                1.5,
                work=harness.Work.CPU,
            ),
            harness.at_most(f"seconds of a report of {lengths[-1]:,} steps", longest["report s"], 60.0, **harness.SECONDS),
            harness.at_most(f"GB of journal in {DAYS} days of the demo's pace", month_gb, 4.0),
        ],
        notes=[
            f"a process that imports the report and does nothing: {start_s:.2f} s, {start_mib:.0f} MiB",
            f"{DAYS} days: {month_steps:,.0f} steps x {aged:.0f} B + {PROCESSES} processes x 2 x {SEGMENT_BYTES >> 20} MiB kept whole"
            f" = {month_gb:.2f} GB; unthinned {month_steps * unthinned / 1e9:.0f} GB",
        ],
    )


def aged_bytes(folder: Path) -> float:
    """Bytes that all journals take for each step once their segments are thinned and compressed."""
    DemoJournals(folder, num_steps=AGED_STEPS).write()
    compressed = []
    for journal in journals_of(folder / "journal"):
        compressed.append(compressed_path(journal, 1))
        compact(journal, compressed[-1])
    return sum(path.stat().st_size for path in compressed) / AGED_STEPS


def month_bytes_of(step_bytes: float) -> float:
    """Return the bytes of all journals after `DAYS` at the demo's pace."""
    return DAYS * 86400 * STEPS_PER_S * step_bytes + PROCESSES * 2 * SEGMENT_BYTES


def _report(run: str) -> tuple[float, float, float]:
    """Seconds, those on a processor, and peak MiB of a process that writes a run's report; of one that only starts for `-`."""
    done = subprocess.run([sys.executable, "-c", _WRITE, run], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    seconds, worked_s, mib = json.loads(done.stdout)
    return seconds, worked_s, mib


if __name__ == "__main__":
    harness.run("report", measure)
