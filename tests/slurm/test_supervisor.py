"""The supervisor of a node, without Slurm."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pipelinerl.config.file import parse
from pipelinerl.launch.slurm.submit import prepare
from pipelinerl.launch.supervisor import UNFINISHED
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
