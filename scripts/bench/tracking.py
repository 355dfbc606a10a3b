#!/usr/bin/env python
"""Measures what a tracker in trouble costs the run, and what it loses: Weights & Biases down, slow and crashing, beside one real run.

The demo's model on real vLLM and the real trainer, without a last step. Beside it, in turns: a tracker whose server refuses every
connection; one whose server takes connections and never answers; one whose server answers nonsense and whose service, a process of W&B's
own, is killed every few seconds. Each runs through short segments and is stopped (SIGSTOP, with all it has started) for every other one,
so that a machine that slows down slows both: a segment's speed is held against the mean of the two around it, and the median of these
ratios counts. It then has two segments' work to do in one, so this is twice what it costs, at most. As many segments without any tracker,
halved in the same way, say how far such a median is from 1 by chance. A tracker's start (importing wandb, once per run) is not within a
segment. At the end everything is sent from the journal, offline, and W&B's own files are compared with it.

A tracker and the run share a disk and processors, and nothing else, so what a run can lose is told by the processor time, too, that a
tracker takes with all it has started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipelinerl.observe.lines import JournalTail, read_journal
from pipelinerl.observe.tracking.beside import command, track
from scripts.bench import harness
from scripts.bench.demo_runs import prepare
from tests.observe.tracking.wandb_file import history

TROUBLES = ("down", "slow", "crashing")
WARM_S, QUICK_WARM_S = 8.0, 4.0
"""A tracker's start: Python imports wandb, wandb starts its service."""
KILL_EVERY_S = 5.0
SEGMENTS, SEGMENT_S = 31, 3.0
"""Odd: the first and the last are without a tracker. Shorter is told by too few steps; longer lets the machine change between two."""
QUICK_SEGMENTS, QUICK_SEGMENT_S = 5, 0.6


def measure(arguments: Any) -> harness.Measured:
    segments, segment_s = (QUICK_SEGMENTS, QUICK_SEGMENT_S) if arguments.quick else (SEGMENTS, SEGMENT_S)
    rows: list[harness.Row] = []
    with tempfile.TemporaryDirectory() as folder, _running(Path(folder)) as run_folder:
        for trouble in ("none", *(TROUBLES[:1] if arguments.quick else TROUBLES)):
            with _tracker(run_folder, trouble, warm_s=QUICK_WARM_S if arguments.quick else WARM_S) as tracker:
                began, spent_s = time.time(), tracker.cpu_s()
                speeds = _segments(JournalTail(run_folder), tracker, num=segments, seconds=segment_s)
                used = (tracker.cpu_s() - spent_s) / (time.time() - began) / (os.cpu_count() or 1)
            ratios = [2 * speeds[at] / (speeds[at - 1] + speeds[at + 1]) for at in range(1, segments, 2)]
            rows.append(
                {
                    "W&B is": trouble,
                    "steps/s without": statistics.mean(speeds[::2]),
                    "speed over none": statistics.median(ratios),
                    "standard error": _error(ratios),
                    "processor time": used,
                }
            )
            print(rows[-1], flush=True)
        _end(run_folder)
        lost = _lost(run_folder)
    none, *troubled = rows
    noise = max(abs(none["speed over none"] - 1), none["standard error"])
    speed = f"speed over none (noise {noise:.3f})"
    return harness.Measured(
        rows=rows,
        goals=[
            *(
                harness.at_most(
                    f"{row['W&B is']}: part of the machine's processor time", row["processor time"], 0.01, work=harness.Work.CPU
                )
                for row in troubled
            ),
            *(
                harness.at_least(f"{row['W&B is']}: {speed}", row["speed over none"], round(0.99 - noise, 4), work=harness.Work.CPU)
                for row in troubled
            ),
            harness.at_most("steps missing in W&B afterwards", float(lost), 0),
        ],
        notes=[
            f"{segments} segments of {segment_s:g} s each, every other without; medians of {segments // 2} ratios",
            f"noise: the larger of how far two halves without any tracker are apart, and of the standard error of that; here {noise:.4f}",
        ],
    )


def _segments(journals: JournalTail, tracker: Tracker, *, num: int, seconds: float) -> list[float]:
    """Steps per second in each segment, the tracker running in every second one."""
    speeds: list[float] = []
    for number in range(num):
        tracker.let_run(number % 2 == 1)
        speeds.append(_window(journals, seconds))
    tracker.let_run(True)
    return speeds


def _error(ratios: list[float]) -> float:
    """Return the standard error of their median, as of a normal distribution's: 1.25 standard errors of the mean."""
    return 1.2533 * statistics.stdev(ratios) / len(ratios) ** 0.5


@contextlib.contextmanager
def _running(folder: Path) -> Iterator[Path]:
    """A run under way; its folder."""
    settings = prepare(folder)
    overrides = ["trainer.steps=1000000", "checkpoint.every=1000000", "evaluation.every=0", "evaluation.limit=8", "run.name=tracked"]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipelinerl", "run", str(settings), *overrides], stdout=log, stderr=log, start_new_session=True
        )
    try:
        found = None
        while found is None or len(_steps(found)) < 3:
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.5)
            found = next(iter(folder.glob("tracked-*")), None)
        (found / "launcher.pid").write_text(str(process.pid))
        yield found
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)


def _end(run_folder: Path) -> None:
    """Interrupt the run as Ctrl-C does, and wait for its end."""
    os.kill(int((run_folder / "launcher.pid").read_text()), signal.SIGINT)
    while not any(line["kind"] == "end" for line in _lines(run_folder)):
        time.sleep(0.5)


class Tracker:
    """A tracker and whatever it has started; `process_id` None: there is none."""

    def __init__(self, process_id: int | None) -> None:
        self.process_id = process_id

    def cpu_s(self) -> float:
        """Processor seconds so far."""
        return sum(self.tree().values())

    def tree(self) -> dict[int, float]:
        """Its processes, with their processor seconds."""
        return {} if self.process_id is None else _tree(self.process_id)

    def let_run(self, runs: bool) -> None:
        """Stop it where it stands, or let it go on."""
        for process in self.tree():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT if runs else signal.SIGSTOP)


@contextlib.contextmanager
def _tracker(run_folder: Path, trouble: str, *, warm_s: float) -> Iterator[Tracker]:
    """A tracker beside the run, in trouble."""
    if trouble == "none":
        yield Tracker(None)
        return
    with _server(trouble) as port, open(run_folder / "logs" / "track-wandb.log", "a") as log:
        environment = os.environ | {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{port}"}
        process = subprocess.Popen(command(run_folder, "wandb"), env=environment, stdout=log, stderr=log, start_new_session=True)
        tracker = Tracker(process.pid)
        over = threading.Event()

        def kill() -> None:
            while not over.wait(KILL_EVERY_S):
                _kill(set(tracker.tree()) - {process.pid})

        killer = threading.Thread(target=kill)
        time.sleep(warm_s)
        if trouble == "crashing":
            killer.start()
        try:
            yield tracker
        finally:
            over.set()
            if killer.is_alive():
                killer.join()
            _kill(tracker.tree())
            process.wait()


def _kill(processes: Iterable[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@contextlib.contextmanager
def _server(trouble: str) -> Iterator[int]:
    """The port of a server that is down, never answers, or answers what is no HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if trouble == "down":
            server.close()
            yield port
            return
        taken: list[socket.socket] = []
        over = threading.Event()

        def serve() -> None:
            server.settimeout(0.2)
            while not over.is_set():
                with contextlib.suppress(OSError):
                    taken.append(server.accept()[0])
                    if trouble == "crashing":
                        taken.pop().sendall(b"nonsense\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield port
        finally:
            over.set()
            thread.join()
            for each in taken:
                each.close()


def _window(journals: JournalTail, seconds: float) -> float:
    """Steps per second from now on, for about so long and at least two of them, from the end of one step to the end of another."""
    began = time.time()
    ends: list[float] = []
    while time.time() < began + seconds or len(ends) < 3:
        time.sleep(0.2)
        ends += [line["t"] for line in journals.new_lines() if line["kind"] == "step" and line["t"] >= began]
    return (len(ends) - 1) / (ends[-1] - ends[0])


def _lost(run_folder: Path) -> int:
    """Steps of the journal that W&B's own files do not hold, once everything was sent, offline."""
    os.environ["WANDB_MODE"] = "offline"
    track(run_folder, ["wandb"])
    sent = {row["progress/step"] for row in history(run_folder) if "reward/all/mean" in row}
    return len(set(_steps(run_folder)) - sent)


def _steps(run_folder: Path) -> list[int]:
    return [line["step"] for line in _lines(run_folder) if line["kind"] == "step"]


def _lines(run_folder: Path) -> list[dict[str, Any]]:
    journal = run_folder / "journal" / "orchestrator.jsonl"
    return list(read_journal(journal)) if journal.exists() else []


def _tree(root: int) -> dict[int, float]:
    """Return the processor seconds of the root and of each process that it has started, with those of children that were waited for."""
    parents, seconds = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields, process = path.read_text().rpartition(")")[2].split(), int(path.parent.name)
            parents[process], seconds[process] = int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    found = {root}
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return {process: seconds[process] for process in found if process in seconds}


if __name__ == "__main__":
    harness.run("tracking", measure)
