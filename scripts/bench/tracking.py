#!/usr/bin/env python
"""What does a tracker in trouble cost the run, and what does it lose? Weights & Biases down, slow and crashing, beside one real run.

The demo's model on real vLLM and the real trainer, without a last step. Beside it, in turns: no tracker; one whose server refuses every
connection; one whose server takes connections and never answers; one whose server answers nonsense and whose service, a process of W&B's
own, is killed every few seconds. Windows without a tracker stand before and after each of the others, in the same run, so that a machine
that slows down slows both. A tracker's start (importing wandb, once per run) is not within a window. At the end everything is sent from the
journal, offline, and W&B's own files are compared with it.

A tracker and the run share a disk and processors, and nothing else. So what a run can lose is the processor time a tracker takes, with all
that it has started: that is what has a goal. The ratio of speeds says the same with the noise of a machine that others use, too.
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

from pipelinerl.demo.settings import demo_config, make_demo_model
from pipelinerl.metrics import read_journal
from pipelinerl.tracking.beside import command, track
from scripts.bench import harness
from tests.tracking.wandb_file import history

TROUBLES = ("down", "slow", "crashing")
WARM_S = 8.0
"""A tracker's start: Python imports wandb, wandb starts its service."""
KILL_EVERY_S = 5.0
ROUNDS, WINDOW_S = 3, 10.0
QUICK_ROUNDS, QUICK_WINDOW_S = 1, 3.0


def main() -> None:
    arguments = harness.options(__doc__ or "").parse_args()
    rounds, window_s = (QUICK_ROUNDS, QUICK_WINDOW_S) if arguments.quick else (ROUNDS, WINDOW_S)
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as folder, _running(Path(folder)) as run_folder:
        for number in range(rounds):
            before = _window(run_folder, window_s)
            for trouble in TROUBLES:
                with _tracker(run_folder, trouble, warm_s=1.0 if arguments.quick and number else WARM_S) as cpu_s:
                    spent = cpu_s()
                    rate = _window(run_folder, window_s)
                    spent = cpu_s() - spent
                after = _window(run_folder, window_s)
                rows.append(
                    [number, trouble, (before + after) / 2, rate, 2 * rate / (before + after), spent / window_s / (os.cpu_count() or 1)]
                )
                print(rows[-1], flush=True)
                before = after
        _end(run_folder)
        lost = _lost(run_folder)
    goals = [
        harness.Goal(name=f"{trouble}: part of the machine's processor time", value=_most(rows, trouble, 5), goal=0.01, at_least=False)
        for trouble in TROUBLES
    ]
    goals.append(harness.Goal(name="steps missing in W&B afterwards", value=float(lost), goal=0, at_least=False))
    columns = ["round", "W&B is", "tok/s without", "tok/s beside", "ratio", "processor time"]
    ratios = sorted(row[4] for row in rows)
    notes = [
        f"windows of {window_s:g} s, {rounds} rounds; the goals are about the worst window of each kind",
        f"speed over no tracker: median {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}",
    ]
    harness.finish("tracking", arguments=arguments, columns=columns, rows=rows, goals=goals, notes=notes)


@contextlib.contextmanager
def _running(folder: Path) -> Iterator[Path]:
    """A run under way; its folder."""
    settings = demo_config(folder=folder, seed=0)
    make_demo_model(folder / "demo-model", seed=0)
    overrides = ["trainer.steps=1000000", "checkpoint.every=1000000", "evaluation.every=0", "evaluation.limit=8", "run.name=tracked"]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipelinerl", "run", str(settings), *overrides], stdout=log, stderr=log, start_new_session=True
        )
    try:
        found = None
        while found is None or len(_steps(found)) < 5:
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
    """What Ctrl-C does; wait for the end."""
    os.kill(int((run_folder / "launcher.pid").read_text()), signal.SIGINT)
    while not any(line["kind"] == "end" for line in _lines(run_folder)):
        time.sleep(0.5)


@contextlib.contextmanager
def _tracker(run_folder: Path, trouble: str, *, warm_s: float) -> Iterator[Any]:
    """A tracker beside the run, in trouble; gives what tells the processor seconds it and its children have spent."""
    with _server(trouble) as port, open(run_folder / "logs" / "track-wandb.log", "a") as log:
        environment = os.environ | {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{port}"}
        tracker = subprocess.Popen(command(run_folder, "wandb"), env=environment, stdout=log, stderr=log, start_new_session=True)
        over = threading.Event()

        def kill() -> None:
            while not over.wait(KILL_EVERY_S):
                _kill(set(_tree(tracker.pid)) - {tracker.pid})

        killer = threading.Thread(target=kill)
        time.sleep(warm_s)
        if trouble == "crashing":
            killer.start()
        try:
            yield lambda: sum(_tree(tracker.pid).values())
        finally:
            over.set()
            if killer.is_alive():
                killer.join()
            _kill(_tree(tracker.pid))
            tracker.wait()


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


def _window(run_folder: Path, seconds: float) -> float:
    """Tokens generated per second, over a window that begins now, by the run's own gauges."""
    began = time.time()
    time.sleep(seconds + 0.6)
    gauges = [(line["t"], line["generated_tokens"]) for line in _lines(run_folder) if line["kind"] == "status" and line["t"] >= began]
    return (gauges[-1][1] - gauges[0][1]) / (gauges[-1][0] - gauges[0][0])


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
    """By process, the root and whatever it has started: processor seconds, with those of the children it has waited for."""
    parents, seconds = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields, process = path.read_text().rpartition(")")[2].split(), int(path.parent.name)
            parents[process], seconds[process] = int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    found = {root}
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return {process: seconds[process] for process in found if process in seconds}


def _most(rows: list[list[Any]], trouble: str, column: int) -> float:
    return max(row[column] for row in rows if row[1] == trouble)


if __name__ == "__main__":
    main()
