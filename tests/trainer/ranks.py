"""Runs a function on several ranks, real processes with real collectives, for one layout after the other in the same processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

from pipelinerl.layout import Layout
from trainer.parallel import Replicas

Job = Callable[[Replicas], Any]
"""What a rank does under a layout; its result must be something `torch.save` takes and loads with weights only."""


def open_store() -> torch.distributed.TCPStore:
    """Where ranks find each other, kept as torchrun keeps it: by their parent, on a port of the system's choice that nobody can take.

    Hold on to it as long as they run, and hand them its port only: a copy that ends in a child ends the parent's, too.
    """
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def be_rank(rank: int, *, size: int, port: int) -> None:
    """Have this process believe that torchrun started it, and that the others are to be found in the store on `port`."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")


def run_jobs(jobs: Sequence[tuple[Layout, Job]], folder: Path) -> list[list[Any]]:
    """For each job, the result of every rank; all jobs take as many ranks.

    Forked, because importing torch and transformers again in each takes far longer than the tests; with one thread each that is safe.
    """
    size = jobs[0][0].ranks
    stores = [open_store() for _ in jobs]  # one each: what an earlier group left in a store would mislead the next
    torch.multiprocessing.start_processes(
        _run_rank, args=(jobs, folder, [store.port for store in stores]), nprocs=size, start_method="fork"
    )
    return [[torch.load(_path(folder, number, rank), weights_only=True) for rank in range(size)] for number in range(len(jobs))]


def _run_rank(rank: int, jobs: Sequence[tuple[Layout, Job]], folder: Path, ports: list[int]) -> None:
    torch.set_num_threads(1)
    for number, ((layout, job), port) in enumerate(zip(jobs, ports, strict=True)):
        be_rank(rank, size=layout.ranks, port=port)
        replicas = Replicas(ranks=layout.ranks, deadline_s=60, layout=layout)
        torch.save(job(replicas), _path(folder, number, rank))
        replicas.close()


def _path(folder: Path, number: int, rank: int) -> Path:
    return folder / f"job-{number}-rank-{rank}.pt"
