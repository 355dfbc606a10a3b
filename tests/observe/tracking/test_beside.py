"""A tracker beside a run: when it dies the run goes on, says so, and leaves no zombie."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pipelinerl.observe.tracking import beside
from tests import processes

LIVES = """
    import os, pathlib, time
    pathlib.Path(folder, "tracker").write_text(f"{os.getpid()}\\n")
    time.sleep(100)
"""


def test_a_tracker_that_is_killed_is_reaped_and_the_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(beside, "command", lambda run_folder, name: list(processes.program(LIVES, folder=run_folder)))
    with beside.trackers(tmp_path, ["wandb"]):
        tracker = int(processes.read_when_written(tmp_path / "tracker"))
        os.kill(tracker, signal.SIGKILL)
        processes.wait_until(lambda: not Path("/proc", str(tracker)).exists(), what="a killed tracker stays a zombie")
        log = tmp_path / "logs" / "launcher.log"
        processes.wait_until(lambda: log.exists() and "SIGKILL" in log.read_text(), what="nobody says that the tracker is gone")
    said = capsys.readouterr()
    assert (
        f"the tracker wandb was killed by SIGKILL: the run goes on without it, and `pipelinerl track {tmp_path}` sends what it lacks"
        in said.err
    )
    assert "wandb has not got everything" in said.out
