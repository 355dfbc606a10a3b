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
    """For each job, the result of every rank; all jobs take as many ranks, and all find each other once.

    Forked, because importing torch and transformers again in each takes far longer than the tests; with one thread each that is safe.
    """
    size = jobs[0][0].ranks
    store = open_store()
    torch.multiprocessing.start_processes(_run_rank, args=(jobs, folder, store.port), nprocs=size, start_method="fork")
    return [[torch.load(_path(folder, number, rank), weights_only=True) for rank in range(size)] for number in range(len(jobs))]


def _run_rank(rank: int, jobs: Sequence[tuple[Layout, Job]], folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    be_rank(rank, size=jobs[0][0].ranks, port=port)
    known: dict[Layout, Replicas] = {}
    for number, (layout, job) in enumerate(jobs):
        if layout not in known:
            known[layout] = Replicas(ranks=layout.ranks, deadline_s=30, layout=layout)
        torch.save(job(known[layout]), _path(folder, number, rank))
    known[layout].close()


def _path(folder: Path, number: int, rank: int) -> Path:
    return folder / f"job-{number}-rank-{rank}.pt"
