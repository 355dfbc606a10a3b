"""Processes that begin before they are told what to run, as real ones."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pipelinerl.runtime.early import EarlyProcesses
from tests import processes

pytestmark = pytest.mark.process

PROGRAM = """
    import json, os, sys
    from pathlib import Path
    from pipelinerl.runtime import early

    def prepare(settings):
        print("prepared by", json.loads(settings)["name"])
        if json.loads(settings)["name"] == "broken":
            raise RuntimeError("an import that fails")

    def main():
        given = early.arguments(prepare)
        print("runs", given, sys.argv[1:], os.environ.get("GIVEN"), repr(sys.stdin.read()))
        shown = Path("/proc/self/cmdline").read_text().rstrip("\\0").split("\\0")
        Path(given[0]).write_text(json.dumps({"process": os.getpid(), "shown": shown}))

    main()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the program in it."""
    (tmp_path / "slow_program.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*arguments: object) -> tuple[str, ...]:
    return (sys.executable, "-m", "slow_program", *map(str, arguments))


def test_a_process_that_is_taken_is_what_its_command_line_would_have_started(here: Path):
    with EarlyProcesses() as early:
        early.start("slow_program", settings=json.dumps({"name": "first"}))
        assert early.take((sys.executable, "-m", "another", "x"), environment={}, log=here / "log") is None
        taken = early.take(command("told", "two words"), environment={"GIVEN": "yes"}, log=here / "log")
        assert taken is not None
        assert early.take(command("told"), environment={}, log=here / "log") is None, "whoever comes second starts one"
    assert taken.wait(processes.PATIENCE_S) == 0
    assert (here / "log").read_text().splitlines() == [
        "prepared by first",
        "runs ['told', 'two words'] ['told', 'two words'] yes ''",
    ]
    assert json.loads((here / "told").read_text()) == {"process": taken.pid, "shown": list(command("told", "two words"))}


def test_a_command_line_longer_than_there_is_room_for_is_shown_as_far_as_it_goes(here: Path):
    with EarlyProcesses() as early:
        early.start("slow_program", settings=json.dumps({"name": "first"}))
        taken = early.take(command("told", "x" * 5000), environment={}, log=here / "log")
        assert taken is not None
        assert taken.wait(processes.PATIENCE_S) == 0
    shown = json.loads((here / "told").read_text())["shown"]
    assert shown[:4] == list(command("told"))
    assert 1000 < len(shown[4]) < 1100
    assert set(shown[4]) == {"x"}


def test_one_that_could_not_prepare_runs_all_the_same_and_fails_by_it_where_it_is_looked_for(here: Path):
    with EarlyProcesses() as early:
        early.start("slow_program", settings=json.dumps({"name": "broken"}))
        taken = early.take(command("told"), environment={}, log=here / "log")
        assert taken is not None
        assert taken.wait(processes.PATIENCE_S) == 0
    assert "prepared by broken" in (here / "log").read_text()


def test_one_that_was_killed_meanwhile_is_not_taken(here: Path):
    with EarlyProcesses() as early:
        early.start("slow_program", settings=json.dumps({"name": "first"}))
        (process,) = early._waiting.values()
        process.send_signal(signal.SIGKILL)
        process.wait(processes.PATIENCE_S)
        assert early.take(command("told"), environment={}, log=here / "log") is None


def test_one_that_nobody_takes_ends(here: Path):
    with EarlyProcesses() as early:
        early.start("slow_program", settings=json.dumps({"name": "first"}))
        (process,) = early._waiting.values()
    assert process.returncode == -signal.SIGKILL


def test_one_ends_with_the_process_that_started_it(here: Path):
    parent = f"""
        import json, pathlib, time
        from pipelinerl.runtime.early import EarlyProcesses
        early = EarlyProcesses()
        early.start("slow_program", settings=json.dumps({{"name": "first"}}))
        (process,) = early._waiting.values()
        pathlib.Path("child").write_text(f"{{process.pid}}\\n")
        time.sleep({processes.PATIENCE_S})
    """
    with subprocess.Popen(processes.program(parent)) as launcher:
        child = int(processes.read_when_written(here / "child"))
        launcher.kill()
    processes.wait_until(lambda: not processes.is_alive(child), what="an early process outlives its launcher")


def test_a_program_that_was_not_started_early_has_its_own_arguments(here: Path):
    done = subprocess.run(command("told", "x"), check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.stdout == "runs ['told', 'x'] ['told', 'x'] None ''\n"
