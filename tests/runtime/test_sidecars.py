"""A process beside a run: when it dies the run goes on, says so, and leaves no zombie."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from pipelinerl.runtime.sidecars import Sidecar, sidecars
from tests import processes

LIVES = """
    import os, pathlib, time
    pathlib.Path(folder, "sidecar").write_text(f"{os.getpid()}\\n")
    time.sleep(100)
"""
ENDS = """
    import os, pathlib, signal, sys
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    pathlib.Path(folder, "sidecar").write_text(f"{os.getpid()}\\n")
    signal.pause()
"""

IGNORES = """
    import os, pathlib, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path(folder, "sidecar").write_text(f"{os.getpid()}\\n")
    time.sleep(100)
"""


def sidecar(folder: Path, program: str, *, rest_s: float = 10.0) -> Sidecar:
    command = tuple(processes.program(program, folder=folder))
    return Sidecar(name="upload", command=command, rest_s=rest_s, remedy=f"pipelinerl upload {folder}")


def test_one_that_is_killed_is_reaped_and_the_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sidecars(tmp_path, [sidecar(tmp_path, LIVES)]):
        process = int(processes.read_when_written(tmp_path / "sidecar"))
        os.kill(process, signal.SIGKILL)
        processes.wait_until(lambda: not Path("/proc", str(process)).exists(), what="a killed sidecar stays a zombie")
        log = tmp_path / "logs" / "launcher.log"
        processes.wait_until(lambda: log.exists() and "SIGKILL" in log.read_text(), what="nobody says that the sidecar is gone")
    said = capsys.readouterr()
    assert f"upload was killed by SIGKILL: the run goes on without it, and `pipelinerl upload {tmp_path}` does what it left" in said.err
    assert "upload has not finished" in said.out


def test_one_that_does_its_rest_in_time_is_not_spoken_of_and_one_that_does_not_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for program, is_late in ((ENDS, False), (IGNORES, True)):
        (tmp_path / "sidecar").unlink(missing_ok=True)
        with sidecars(tmp_path, [sidecar(tmp_path, program, rest_s=0.5 if is_late else 10.0)]):
            process = int(processes.read_when_written(tmp_path / "sidecar"))
        assert not Path("/proc", str(process)).exists()
        assert ("upload has not finished" in capsys.readouterr().out) == is_late


@pytest.mark.slow
def test_none_has_longer_than_its_machine_and_a_long_wait_says_for_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for left_s, is_told in ((0.1, False), (2.5, True)):
        (tmp_path / "sidecar").unlink(missing_ok=True)
        began = time.monotonic()
        with sidecars(tmp_path, [sidecar(tmp_path, IGNORES, rest_s=60.0)], left_s=lambda left_s=left_s: left_s):
            processes.read_when_written(tmp_path / "sidecar")
        assert time.monotonic() - began < processes.PATIENCE_S
        said = capsys.readouterr().out
        assert "upload has not finished" in said
        assert ("more for upload (its log: " in said) == is_told
