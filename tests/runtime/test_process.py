"""What every process of a run does: leave its last words where they are found, and die with its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from pipelinerl.config.file import load_run, parse, write_run
from pipelinerl.runtime.process import ask_to_replace, asked_to_replace, end_all, how_it_ended, register
from tests import processes


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program inside `crash_report`, as the process `trainer-1` of a run."""
    inside = "".join(f"    {line}\n" for line in code.splitlines())
    whole = (
        "import sys\nfrom pathlib import Path\nfrom pipelinerl.errors import *\nfrom pipelinerl.runtime.process import crash_report\n"
        f"with crash_report(Path({str(folder)!r}), 'trainer-1'):\n{inside}"
    )
    return subprocess.run(processes.program(whole), capture_output=True, text=True, timeout=processes.PATIENCE_S)


def record(folder: Path) -> dict[str, object]:
    return json.loads((folder / "failures" / "trainer-1.json").read_text())


def test_an_error_of_our_own_is_one_message_without_a_traceback(tmp_path: Path):
    ended = run("raise WeightsError('slot 3: digest is ab')", tmp_path)
    assert ended.returncode == 1
    assert ended.stderr == "WeightsError: slot 3: digest is ab\n"
    written = record(tmp_path)
    assert (written["process"], written["error"]) == ("trainer-1", "WeightsError: slot 3: digest is ab")
    assert "Traceback" in str(written["traceback"])


def test_any_other_error_shows_its_traceback_with_its_cause(tmp_path: Path):
    ended = run("try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise RuntimeError('no batch') from error", tmp_path)
    assert ended.returncode == 1
    assert "ZeroDivisionError: division by zero" in ended.stderr
    assert ended.stderr.rstrip().endswith("RuntimeError: no batch")
    assert record(tmp_path)["error"] == "RuntimeError: no batch"


def test_errors_of_several_tasks_are_told_one_by_one(tmp_path: Path):
    code = (
        "raise ExceptionGroup('tasks', [PeerSilent('engine 3'), ExceptionGroup('more', [Stalled('nothing moved'), PeerGone('scorer-0')])])"
    )
    ended = run(code, tmp_path)
    expected = "PeerSilent: engine 3\nStalled: nothing moved\nPeerGone: scorer-0"
    assert ended.stderr == expected + "\n"
    assert record(tmp_path)["error"] == expected


@pytest.mark.parametrize(("code", "returncode"), [("pass", 0), ("sys.exit(7)", 7), ("sys.exit(0)", 0)])
def test_an_end_that_is_no_error_leaves_no_record(tmp_path: Path, code: str, returncode: int):
    assert run(code, tmp_path).returncode == returncode
    assert not (tmp_path / "failures").exists()


def test_an_interrupt_passes_through(tmp_path: Path):
    ended = run("raise KeyboardInterrupt", tmp_path)
    assert ended.returncode == -signal.SIGINT
    assert not (tmp_path / "failures").exists()


CHILD = """
    import os, sys, time
    from pathlib import Path
    from pipelinerl.runtime.process import die_with_parent

    die_with_parent(parent_id)
    Path(path).write_text(f"{os.getpid()}\\n")
    time.sleep(100)
"""
PARENT = """
    import subprocess, sys, time
    child = subprocess.Popen(command)
    time.sleep(100)
"""


def test_a_child_ends_with_its_parent_however_that_ends(tmp_path: Path):
    command = processes.program(CHILD, parent_id=None, path=tmp_path / "child")
    parent = subprocess.Popen(processes.program(PARENT, command=command))
    child_id = int(processes.read_when_written(tmp_path / "child"))
    try:
        assert processes.is_alive(child_id)
        parent.kill()
        parent.wait()
        processes.wait_until(lambda: not processes.is_alive(child_id), what="the child outlives its parent")
    finally:
        processes.end(child_id)


def test_a_child_whose_parent_is_gone_already_ends_at_once(tmp_path: Path):
    """Its parent's id is another's by now, or nobody's: here that of a process that has just ended."""
    gone = subprocess.Popen(processes.program("pass"))
    gone.wait()
    ended = subprocess.run(processes.program(CHILD, parent_id=gone.pid, path=tmp_path / "child"), timeout=processes.PATIENCE_S)
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "child").exists()


def test_a_child_whose_parent_lives_goes_on(tmp_path: Path):
    code = "from pipelinerl.runtime.process import die_with_parent\ndie_with_parent(parent_id)\n"
    assert subprocess.run(processes.program(code, parent_id=os.getpid()), timeout=processes.PATIENCE_S).returncode == 0


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-(signal.SIGRTMIN + 3), f"was killed by signal {signal.SIGRTMIN + 3}"),
    ],
)
def test_an_end_is_told_by_exit_code_or_by_the_signals_name(code: int, how: str):
    assert how_it_ended(code) == how


def test_processes_are_asked_to_end_and_killed_after_the_grace():
    deaf = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(flush=True)\ntime.sleep(100)"
    codes = {"deaf": deaf, "too": deaf, "asked": "import time\nprint(flush=True)\ntime.sleep(100)", "ended": "print()\nraise SystemExit(3)"}
    started = [subprocess.Popen(processes.program(code), stdout=subprocess.PIPE) for code in codes.values()]
    for process in started:
        assert process.stdout is not None
        with process.stdout as said:
            said.readline()  # it is as deaf as it will be
    started[-1].wait()
    began = time.monotonic()
    assert end_all(started, grace_s=0.5) == [-signal.SIGKILL, -signal.SIGKILL, -signal.SIGTERM, 3]
    assert 0.5 <= time.monotonic() - began < 20.0


def test_every_process_reads_the_same_settings(tmp_path: Path):
    config = parse(
        {"model": {"path": "m"}, "data": {"source": "d"}, "reward": [{"function": "f:g"}], "trainer": {"steps": 7}}, origin="here"
    )
    write_run(tmp_path, config)
    assert load_run(tmp_path) == config


def test_a_process_of_a_run_may_open_as_many_files_as_the_system_allows(tmp_path: Path):
    code = "import resource; before, most = resource.getrlimit(resource.RLIMIT_NOFILE); print(before == most, most)"
    process = subprocess.run(
        ["sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh", *processes.program(WHOLE.format(folder=str(tmp_path), code=code))],
        capture_output=True,
        text=True,
        timeout=processes.PATIENCE_S,
    )
    assert process.stdout.startswith("True"), process.stderr


WHOLE = """
from pathlib import Path
from pipelinerl.runtime.process import crash_report

with crash_report(Path({folder!r}), 'trainer-1'):
    {code}
"""


def test_a_peer_is_replaced_by_what_its_process_has_registered_and_not_for_what_the_one_before_did(tmp_path: Path):
    register(tmp_path, "engine-1")
    ask_to_replace(tmp_path, "engine-1")
    ask_to_replace(tmp_path, "engine-7")  # of which nobody here knows
    ((path, peer, process_id),) = asked_to_replace(tmp_path)
    assert (peer, process_id) == ("engine-1", os.getpid())
    os.utime(tmp_path / "processes" / "engine-1", ns=(0, path.stat().st_mtime_ns + 1))
    assert list(asked_to_replace(tmp_path)) == []
    assert not path.exists(), "it was about the process before"
    ask_to_replace(tmp_path, "engine-1")
    (tmp_path / "processes" / "engine-1").write_text("another-machine 17")
    os.utime(tmp_path / "processes" / "engine-1", ns=(0, 0))
    assert list(asked_to_replace(tmp_path)) == []
    assert path.exists(), "that machine's launcher looks for it"
