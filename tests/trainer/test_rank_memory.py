"""No rank of a sharded model holds all of it: not while it is read, and not while it is published.

Counted is what a process has for itself (RssAnon). Pages of the model's files and of the weight buffer are the machine's, once for all.
"""

# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelinerl.config.layout import Layout
from pipelinerl.weights.base import plan_layout
from tests.trainer.ranks import run_jobs
from tests.trainer.tiny import make_folder, make_model
from tests.trainer.zeros import make_zeros
from trainer.parallel.replicas import Replicas
from trainer.weights.publisher import Publisher
from trainer.weights.sharded_weights import ShardedWeights

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="real collectives between processes need two cores to end in time"),
]
LAYERS = 8
M_MMAP_THRESHOLD = -3


def own_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


@contextlib.contextmanager
def peak_of(found: list[int]) -> Iterator[None]:
    """Append the most that this process took within, over what it had before, in bytes."""
    gc.collect()
    before, over = own_bytes(), threading.Event()
    peaks = [before]

    def look() -> None:
        while not over.wait(0.0005):
            peaks.append(own_bytes())

    with contextlib.ExitStack() as at_end:
        watcher = threading.Thread(target=look)
        watcher.start()
        at_end.callback(watcher.join)
        at_end.callback(over.set)
        yield
        peaks.append(own_bytes())
    found.append(max(peaks) - before)


def load(replicas: Replicas, *, folder: Path, tiny: Path) -> list[int]:
    """Bytes that this rank took at most for reading the model."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 18)
    make_model(tiny, replicas=replicas)
    found: list[int] = []
    with peak_of(found):
        make_model(folder, dtype="bfloat16", replicas=replicas)
    replicas.all_agree(True, what="to end together")
    return found


def load_and_publish(replicas: Replicas, *, folder: Path, tiny: Path, run_folder: Path) -> list[int]:
    """Bytes that this rank took at most for reading the model, and then for publishing it."""
    # What is given back goes back at once: a process of many tests before has its allocator keep blocks of up to 32 MiB.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 18)
    make_model(tiny, replicas=replicas)  # what is imported and opened at the first time is not the model's
    found: list[int] = []
    with peak_of(found):
        model = make_model(folder, dtype="bfloat16", replicas=replicas)
    sharded = ShardedWeights(model, replicas=replicas)
    publisher = None
    if replicas.rank == 0:
        described = {name: tensor for name, tensor in sharded.described().items() if name not in model.tied_names}
        publisher = Publisher(sharded.described, tied_names=model.tied_names, run_folder=run_folder, deadline_s=20.0, write=sharded.lead)
        publisher.fix_layout(plan_layout(described), transport="shared_memory")
    with peak_of(found):
        if publisher is None:
            sharded.follow()
        else:
            assert publisher.publish(1) is not None
            sharded.end()
    replicas.all_agree(True, what="to end together")
    if publisher is not None:
        publisher.close()
    return found


def test_two_ranks_hold_half_of_a_model_each_and_a_layer_more_while_it_is_read_and_published(tmp_path: Path) -> None:
    """A rank that read all of it in float32 would take the whole."""
    whole = make_zeros(tmp_path / "model", vocab_size=256, intermediate_size=2048, num_hidden_layers=LAYERS)
    tiny = make_folder(tmp_path / "tiny", family="qwen3")
    job = functools.partial(load_and_publish, folder=tmp_path / "model", tiny=tiny, run_folder=tmp_path / "run")
    (ranks,) = run_jobs([(Layout(ranks=2, shard=2), job)], tmp_path)
    print(f"{whole >> 20} MiB in float32; reading and publishing took {[[peak >> 20 for peak in found] for found in ranks]} MiB")
    for read, published in ranks:
        assert read < whole * 3 / 4
        assert published < whole / LAYERS


def test_four_ranks_cut_matrices_before_they_make_float32_of_them(tmp_path: Path) -> None:
    """A rank that read all of it in float32, to cut it then, would take four times its own quarter."""
    whole = make_zeros(tmp_path / "model", vocab_size=256, intermediate_size=2048, num_hidden_layers=LAYERS)
    tiny = make_folder(tmp_path / "tiny", family="qwen3")
    job = functools.partial(load, folder=tmp_path / "model", tiny=tiny)
    (ranks,) = run_jobs([(Layout(ranks=4, shard=2, tensor=2), job)], tmp_path)
    print(f"{whole >> 20} MiB in float32; reading took {[peak >> 20 for (peak,) in ranks]} MiB")
    for (read,) in ranks:
        assert read < whole / 2
