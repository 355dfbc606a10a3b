"""`pipelinerl compare --modes` that is ended while a mode runs: its run saves, and nothing outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import processes

pytestmark = pytest.mark.process

RUN = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[0]).parent
def note(*_):
    with open(folder / "interrupts", "a") as file:
        file.write("x")
signal.signal(signal.SIGINT, note)
(folder / "id.draft").write_text(f"{os.getpid()}\\n")
(folder / "id.draft").rename(folder / "id")
while not (folder / "interrupts").exists():
    time.sleep(0.01)
time.sleep(1.0)  # it saves
"""
COMPARES = """
    import pathlib, sys
    from pipelinerl.cli import modes
    sys.executable = run
    modes._run(pathlib.Path("config.toml"), [], folder=pathlib.Path(folder), mode="sync", place="1 of 2", seconds=None)
"""


@pytest.fixture
def comparing(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A comparison in a session of its own, as of a terminal, and the process of the mode that it runs."""
    run = tmp_path / "run"
    run.write_text(f"#!{sys.executable}\n{RUN}")
    run.chmod(0o700)
    command = processes.program(COMPARES, run=str(run), folder=tmp_path)
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        run_id = int(processes.read_when_written(tmp_path / "id"))
        yield process, run_id
        process.kill()
        processes.end(run_id)


def test_ctrl_c_in_a_terminal_reaches_the_run_once(comparing: tuple[subprocess.Popen[bytes], int], tmp_path: Path) -> None:
    process, run_id = comparing
    os.killpg(process.pid, signal.SIGINT)
    process.wait(processes.PATIENCE_S)
    assert not processes.is_alive(run_id)
    assert (tmp_path / "interrupts").read_text() == "x", "a second one ends a run without saving"


def test_a_comparison_that_is_killed_leaves_no_run_behind(comparing: tuple[subprocess.Popen[bytes], int]) -> None:
    process, run_id = comparing
    process.kill()
    processes.wait_until(lambda: not processes.is_alive(run_id), what="the run of a mode outlives the comparison")
