"""Runs a function on several ranks, real processes with real collectives, for one layout after the other in the same processes."""

# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

from pipelinerl.config.layout import Layout
from trainer.parallel.replicas import Replicas

Job = Callable[[Replicas], Any]
"""What a rank does under a layout; its result must be something `torch.save` takes and loads with weights only."""


class Ranks:
    """A function on several ranks: each a forked process that believes it was started as one.

    Forked, because importing torch and transformers again in each takes far longer than the tests; with one thread each that is safe. None
    begins before all are forked: the store's thread, busy with the first, holds locks, and who is forked with one waits for it in vain.
    """

    def __init__(self, function: Callable[..., None], *args: Any, size: int) -> None:
        """Each calls `function(rank, *args)`."""
        # Where they find each other, kept by their parent, on a port of the system's choice that nobody can take.
        # They are handed the port only: a store that ends in a child ends the parent's, too.
        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        all_forked = torch.multiprocessing.get_context("fork").Event()
        begin = functools.partial(_begin, function=function, args=args, size=size, port=self._store.port, all_forked=all_forked)
        ranks = torch.multiprocessing.start_processes(begin, nprocs=size, join=False, start_method="fork")
        assert ranks is not None
        self._ranks = ranks
        all_forked.set()

    def join(self) -> None:
        """Wait for all of them. Raises what the first of them raised that failed."""
        while not self._ranks.join():
            pass


def _begin(rank: int, *, function: Callable[..., None], args: tuple[Any, ...], size: int, port: int, all_forked: Event) -> None:
    gc.freeze()  # garbage of tests before has threads that are not in this process: groups of gloo abort or hang where they are collected
    all_forked.wait()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")
    function(rank, *args)


def run_jobs(jobs: Sequence[tuple[Layout, Job]], folder: Path) -> list[list[Any]]:
    """For each job, the result of every rank; all jobs take as many ranks, and all find each other once."""
    size = jobs[0][0].ranks
    Ranks(_run_jobs, jobs, folder, size=size).join()
    return [[torch.load(_path(folder, number, rank), weights_only=True) for rank in range(size)] for number in range(len(jobs))]


def _run_jobs(rank: int, jobs: Sequence[tuple[Layout, Job]], folder: Path) -> None:
    torch.set_num_threads(1)
    known: dict[Layout, Replicas] = {}
    for number, (layout, job) in enumerate(jobs):
        if layout not in known:
            known[layout] = Replicas(ranks=layout.ranks, deadline_s=30, layout=layout)
        torch.save(job(known[layout]), _path(folder, number, rank))
    known[layout].close()


def _path(folder: Path, number: int, rank: int) -> Path:
    return folder / f"job-{number}-rank-{rank}.pt"
