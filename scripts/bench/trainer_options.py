"""Measures what three options of the trainer are worth on this machine: `compile`, `activation_checkpointing` and `prefetch_layers`.

Seconds are a core's for one packed row, forward and backward, by one thread: what other processes take of it is nobody's here. Rows differ
in length and number of samples, and all ways take the same ones, in turns, in one process. `compile`'s first row, which compiles, is told
apart. Memory is how far the peak of a process of its own grew in the longest row, its gradients being there already. `prefetch_layers` is
between two sharded ranks over gloo, each a process with one thread, in turns: seconds by the clock of a row on the slower one.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from pipelinerl.config.layout import Layout
from pipelinerl.config.trainer_memory import ActivationCheckpointing
from scripts.bench import children, harness
from scripts.bench.qwen3 import qwen3_config
from trainer.model.model import Model
from trainer.parallel.replicas import Replicas
from trainer.rows.arrange import arrange
from trainer.rows.packed_row import PackedRow

FOLDER = Path("runs/bench-trainer-options")
VOCABULARY, HIDDEN, LAYERS = 4096, 512, 4
LENGTHS = (1024, 330, 700)
"""Tokens of the rows; the first is the one whose memory is measured."""
PREFETCHED = (1, 2)
NONE, SELECTIVE, FULL = ActivationCheckpointing.NONE, ActivationCheckpointing.SELECTIVE, ActivationCheckpointing.FULL
WAYS: dict[str, dict[str, Any]] = {
    "all kept": {"activation_checkpointing": NONE},
    "all kept, compiled": {"activation_checkpointing": NONE, "is_compiled": True},
    "selective": {"activation_checkpointing": SELECTIVE},
    "full": {"activation_checkpointing": FULL},
}


def measure(arguments: Any) -> harness.Measured:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    children.result_of(_make_model)
    lengths, rounds = (LENGTHS[:2], 2) if arguments.quick else (LENGTHS, 3)
    alone = {name: children.result_of(_first_s_and_peak_mb, name) for name in WAYS}
    sharded = harness.in_turns(2, {str(num): functools.partial(_sharded_s, num, lengths) for num in PREFETCHED})
    models = {name: _model(**options) for name, options in WAYS.items()}  # the last: a process that has computed is not forked any more
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_cache("all kept, compiled"))  # what was compiled in a process before this one
    torch.set_num_threads(1)
    for model in models.values():
        _seconds(model, lengths[:2])
    turns = harness.in_turns(
        rounds, {name: functools.partial(_seconds, model, lengths, time.process_time) for name, model in models.items()}
    )
    kept, prefetched = turns["all kept"], sharded[str(PREFETCHED[0])]
    rows = [_row(name, statistics.median(turns[name]), harness.median_ratio(turns[name], kept), *alone[name]) for name in WAYS]
    rows += [
        _row(f"2 sharded ranks, {num} layers ahead", statistics.median(own), harness.median_ratio(own, prefetched), None, None)
        for num, own in ((num, sharded[str(num)]) for num in PREFETCHED)
    ]
    judged: dict[str, Any] = {"work": harness.Work.CPU, "speeds": turns.speeds}
    over_kept = {row["way"]: row["over the first"] for row in rows}
    return harness.Measured(
        rows=rows,
        goals=[
            harness.at_most("a compiled row over one as it is", over_kept["all kept, compiled"], 1.0, **judged),
            harness.at_most("selective over full checkpointing, seconds", over_kept["selective"] / over_kept["full"], 1.0, **judged),
            harness.at_most("selective over no checkpointing, memory", alone["selective"][1] / alone["all kept"][1], 1.0),
        ],
    )


def _row(way: str, seconds: float, ratio: float, first: float | None, memory: float | None) -> harness.Row:
    return {"way": way, "s of a core a row": seconds, "over the first": ratio, "first row s": first, "memory of the longest MB": memory}


def _make_model() -> None:
    torch.manual_seed(0)
    config = qwen3_config(vocabulary=VOCABULARY, hidden=HIDDEN, layers=LAYERS, heads=8, positions=4096)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(FOLDER / "model")


def _model(*, replicas: Replicas | None = None, **options: Any) -> Model:
    return Model(FOLDER / "model", dtype="float32", temperature=1.0, device=torch.device("cpu"), replicas=replicas, **options)


def _rows(lengths: tuple[int, ...]) -> Iterator[PackedRow]:
    """One row of each length, of samples of 64 to 256 tokens, the first quarter of each given."""
    for length in lengths:
        chance = np.random.default_rng(length)
        sizes: list[int] = []
        while (left := length - sum(sizes)) > 0:
            sizes.append(min(left, int(chance.integers(64, 256))) if left > 8 else left)
        mask = np.concatenate([np.arange(size) >= max(1, size // 4) for size in sizes])
        ids = chance.integers(0, VOCABULARY, length, dtype=np.int32)
        row = arrange(ids, loss_mask=mask, lengths=np.array(sizes, np.int32), names=[str(number) for number in range(len(sizes))])
        assert row is not None
        yield row


def _seconds(model: Model, lengths: tuple[int, ...], clock: Callable[[], float] = time.perf_counter) -> float:
    """Mean seconds of a row of these lengths, forward and backward, by this clock."""
    rows = list(_rows(lengths))
    started = clock()
    for row in rows:
        logprobs, entropies = model.logprobs(row)
        (entropies.sum() - logprobs.sum()).backward()
    return (clock() - started) / len(rows)


def _cache(name: str) -> Path:
    return (FOLDER / name.replace(", ", "-").replace(" ", "-")).resolve()


def _first_s_and_peak_mb(name: str) -> tuple[float, float]:
    """Seconds of a process's first row, which compiles with nothing cached; and how far its peak grew in the next one alike, in MB."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_cache(name))
    ctypes.CDLL(None).mallopt(-3, 1 << 18)  # M_MMAP_THRESHOLD: what is given back goes back at once
    model = _model(**WAYS[name])
    first_s = _seconds(model, LENGTHS[:1])
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    _seconds(model, LENGTHS[:1])
    return first_s, (_resident("VmHWM") - before) / 1e6


def _resident(field: str) -> int:
    return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))


def _sharded_s(num_layers: int, lengths: tuple[int, ...]) -> float:
    """Seconds of a row on the slower of two ranks that share the weights and gather so many layers ahead."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    other: list[float] = []
    beside = lambda: other.append(children.result_of(_rank_s, 1, port, num_layers, lengths))  # noqa: E731
    return max(children.result_of(_rank_s, 0, port, num_layers, lengths, meanwhile=beside), *other)


def _rank_s(rank: int, port: int, num_layers: int, lengths: tuple[int, ...]) -> float:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    replicas = Replicas(ranks=2, deadline_s=60.0, layout=Layout(ranks=2, shard=2))
    model = _model(replicas=replicas, activation_checkpointing=NONE, prefetch_layers=num_layers)
    _seconds(model, lengths[:2])
    found = _seconds(model, lengths)
    replicas.close()
    return found


if __name__ == "__main__":
    harness.run("trainer_options", measure)
