"""A rank that NCCL's watchdog ended names the one that it waited for; here a rank over gloo ends itself as the watchdog would."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests import processes
from tests.trainer.test_ranks import start
from trainer.parallel import progress

HANGS = """
import torch, torch.distributed as dist
from trainer.parallel.progress import PROGRESS, silent_ranks, write_progress
from trainer.parallel.replicas import Replicas, num_collectives
replicas = Replicas(ranks=2, deadline_s=60)
total = torch.ones(1)
dist.all_reduce(total)
write_progress(num_collectives)
if rank == "1":
    time.sleep(100)
waiting = dist.all_reduce(total, async_op=True)
while (found := silent_ranks(int(os.environ[PROGRESS]), first_rank=0))[0] != [1] or "entered 0 " in found[1]:
    time.sleep(0.01)  # until the other has written its first entry, and this one that it entered a second collective
os.abort()
"""


@pytest.mark.process
@pytest.mark.slow
def test_the_rank_that_the_others_waited_for_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert start(tmp_path, HANGS).wait(processes.PATIENCE_S) == 1
    said = capfd.readouterr().err
    assert "PeerSilent: waited until the deadline of a collective for trainer rank 1: rank 1 had entered" in said


@pytest.mark.process
def test_a_rank_that_ends_by_itself_blames_nobody(tmp_path: Path) -> None:
    assert start(tmp_path, "os.abort()").wait(processes.PATIENCE_S) == -6


def table_of(*entries: tuple[float, int]) -> int:
    file = progress.make_table(len(entries))
    os.pwrite(file, b"".join(progress._ENTRY.pack(*entry) for entry in entries), 0)
    return file


def test_who_writes_no_more_is_silent_and_else_who_is_behind() -> None:
    now = time.monotonic()
    assert progress.silent_ranks(table_of((now, 7), (now - 600, 7)), first_rank=8) == ([9], "rank 9 wrote no sign of life for 600 s")
    silent, how = progress.silent_ranks(table_of((now, 7), (now - 0.4, 6), (now, 7)), first_rank=0)
    assert silent == [1]
    assert how == "rank 1 had entered 6 collectives and others 7"
    assert progress.silent_ranks(table_of((now, 7), (now, 7)), first_rank=0)[0] == [], "the silent one is on another machine"
    assert progress.silent_ranks(table_of((0.0, 0), (0.0, 0)), first_rank=0)[0] == [], "none has begun"
