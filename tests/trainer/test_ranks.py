"""Ranks of one machine: they meet where no stranger comes, and end together, as the first of them did."""

from __future__ import annotations

import ipaddress
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests import processes
from tests.listeners import listeners_of, tree_of

STARTS = """
    import os, sys
    os.environ["PYTHONPATH"] = folder
    from pipelinerl.runtime.process import end_alike
    from trainer.parallel.ranks import meeting_in_memory, run_ranks
    with meeting_in_memory() as (where, files):
        code = run_ranks(("job", folder), ranks=range(2), world_size=2, meeting=where, inherited=files)
    if code: end_alike(code)
"""
LIVES = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
def say(text):
    draft = pathlib.Path(sys.argv[1], "draft-" + rank)
    draft.write_text(text + "\\n")
    draft.rename(draft.with_name("rank-" + rank))  # whole at once: who sees it may end us
"""


def start(folder: Path, job: str) -> subprocess.Popen[bytes]:
    """Two ranks of a small program, with their parent."""
    (folder / "job.py").write_text(LIVES + job)
    return subprocess.Popen(processes.program(STARTS, folder=folder), cwd=Path(__file__).parents[2])


def said(folder: Path, rank: int) -> str:
    return processes.read_when_written(folder / f"rank-{rank}")


@pytest.mark.parametrize(
    ("end", "code"), [("os.kill(os.getpid(), 9)", -signal.SIGKILL), ("os.kill(os.getpid(), 11)", -signal.SIGSEGV), ("sys.exit(3)", 3)]
)
def test_the_first_rank_that_ends_badly_ends_all_and_its_end_is_theirs(tmp_path: Path, end: str, code: int):
    other_lives = "while not pathlib.Path(sys.argv[1], 'rank-0').exists(): time.sleep(0.01)"
    parent = start(tmp_path, f"say(str(os.getpid()))\nif rank == '0': time.sleep(100)\n{other_lives}\n{end}")
    assert parent.wait(processes.PATIENCE_S) == code
    assert not processes.is_alive(int(said(tmp_path, 0)))


def test_each_rank_learns_its_number_and_all_that_end_well_end_well(tmp_path: Path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    parent = start(tmp_path, f"say(' '.join(os.environ[name] for name in {names}))")
    assert parent.wait(processes.PATIENCE_S) == 0
    expected = os.environ.get("OMP_NUM_THREADS", "1")
    assert [said(tmp_path, rank) for rank in (0, 1)] == [f"{rank} {rank} 2 2 {expected}" for rank in (0, 1)]


def test_a_parent_that_is_told_to_end_ends_its_ranks(tmp_path: Path):
    parent = start(tmp_path, "say(str(os.getpid()))\ntime.sleep(100)")
    ranks = [int(said(tmp_path, rank)) for rank in (0, 1)]
    parent.terminate()
    assert parent.wait(processes.PATIENCE_S) == 128 + signal.SIGTERM
    assert not any(map(processes.is_alive, ranks))


@pytest.mark.slow
def test_ranks_that_meet_open_no_store_and_listen_on_loopback_alone(tmp_path: Path):
    """What is left is gloo's: one listener for each of a rank's groups."""
    job = """
from trainer.parallel.replicas import Replicas
replicas = Replicas(ranks=2, deadline_s=60)
import torch
total = torch.ones(1)
replicas.sum(total, what="to meet")
say(str(float(total)))
time.sleep(100)
"""
    parent = start(tmp_path, job)
    try:
        assert [said(tmp_path, rank) for rank in (0, 1)] == ["2.0", "2.0"]
        found = listeners_of(tree_of(parent.pid))
        assert found, "gloo listens"
        assert all(one.kind == "tcp" and ipaddress.ip_address(one.address).is_loopback for one in found), found
        assert {one.process_id for one in found} == set(tree_of(parent.pid)) - {parent.pid}, "the parent itself listens nowhere"
    finally:
        parent.terminate()
        parent.wait()
