"""The supervisor of a node, without Slurm."""

from __future__ import annotations

import math
import subprocess
import time
from pathlib import Path

import pytest

from pipelinerl.config.file import parse
from pipelinerl.launch.slurm.__main__ import supervisor_of
from pipelinerl.launch.slurm.submit import prepare
from pipelinerl.launch.supervisor import LEAVE_S, SIDECARS_S, UNFINISHED
from tests.processes import PATIENCE_S, program

pytestmark = pytest.mark.process

LEAVES = """
    import asyncio, os, pathlib, signal, sys, time
    from pipelinerl.launch.slurm.__main__ import supervisor_of
    supervisor = supervisor_of(pathlib.Path(folder), attempt=0, node=1)
    pathlib.Path(folder, "logs", "attempt-0").mkdir(parents=True)
    code = asyncio.run(supervisor._leave(75, until=time.time() + 60))
    os.kill(os.getpid(), signal.SIGTERM)
    sys.exit(code)
"""

WAITS = """
    import asyncio, pathlib, sys, time
    from pipelinerl.launch.slurm.__main__ import supervisor_of
    supervisor = supervisor_of(pathlib.Path(folder), attempt=0, node=0)
    pathlib.Path(folder, "logs", "attempt-0").mkdir(parents=True)

    async def hold(at_end):
        supervisor._save("the allocation is about to end")  # while another holder's lease is waited for

    supervisor._hold = hold
    sys.exit(asyncio.run(supervisor._launch()))
"""


def test_a_node_that_shall_save_before_anything_began_is_to_be_continued(tmp_path: Path):
    tree = {"model": {"path": "m"}, "data": {"source": "p"}, "reward": [{"function": "r:f"}]}
    run_folder = prepare(parse(tree | {"run": {"folder": str(tmp_path)}}, origin="test")).parent
    ended = subprocess.run(program(WAITS, folder=run_folder), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == UNFINISHED, ended.stderr


def test_a_node_that_has_told_how_it_ended_is_not_ended_by_the_exit_of_the_first(tmp_path: Path):
    """srun ends every task when the first node exits with the verdict; the code of one that it ended would become the job's."""
    tree = {"model": {"path": "m"}, "data": {"source": "p"}, "reward": [{"function": "r:f"}], "slurm": {"engine_nodes": 1}}
    run_folder = prepare(parse(tree | {"run": {"folder": str(tmp_path)}}, origin="test")).parent
    ended = subprocess.run(program(LEAVES, folder=run_folder), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == UNFINISHED, ended.stderr
    assert (run_folder / "logs" / "attempt-0" / "node-1.code").read_text() == "75\n"


BESIDE = """
    import asyncio, pathlib, sys, time
    from pipelinerl.launch.slurm.__main__ import supervisor_of
    from pipelinerl.launch.supervisor import LEAVE_S, UNFINISHED
    from pipelinerl.runtime.sidecars import Sidecar
    supervisor = supervisor_of(pathlib.Path(folder), attempt=0, node=0)
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(100)"

    async def launch():
        while not (log := pathlib.Path(folder, "logs", "upload.log")).exists() or "here" not in log.read_text():
            await asyncio.sleep(0.01)
        return UNFINISHED

    supervisor._sidecars = lambda: (Sidecar(name="upload", command=(sys.executable, "-c", ignores), rest_s=900.0, remedy="later"),)
    supervisor._launch = launch
    sys.exit(asyncio.run(supervisor.run(until=time.time() + LEAVE_S + 1)))
"""


def test_what_runs_beside_a_run_ends_before_the_allocation_does(tmp_path: Path):
    tree = {"model": {"path": "m"}, "data": {"source": "p"}, "reward": [{"function": "r:f"}]}
    run_folder = prepare(parse(tree | {"run": {"folder": str(tmp_path)}}, origin="test")).parent
    ended = subprocess.run(program(BESIDE, folder=run_folder), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == UNFINISHED, ended.stderr
    assert "upload has not finished" in ended.stdout


def test_sidecars_have_half_a_minute_where_the_run_goes_on_and_the_rest_of_the_allocation_where_it_is_finished(tmp_path: Path):
    tree = {"model": {"path": "m"}, "data": {"source": "p"}, "reward": [{"function": "r:f"}]}
    run_folder = prepare(parse(tree | {"run": {"folder": str(tmp_path)}}, origin="test")).parent
    supervisor = supervisor_of(run_folder, attempt=0, node=0)
    assert supervisor._left_s(math.inf) == SIDECARS_S
    (run_folder / "journal").mkdir()
    (run_folder / "journal" / "orchestrator.jsonl").write_text('{"kind": "end", "reason": "finished"}\n')
    assert supervisor._left_s(math.inf) == math.inf
    assert supervisor._left_s(time.time() + 100 + LEAVE_S) == pytest.approx(100, abs=PATIENCE_S)
