"""`python -m trainer.gpu_checks [--model FOLDER]`: packed rows through the trainer on this machine, measured; JSON."""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelinerl.demo.sort_digits import make_model
from pipelinerl.messages import PolicyPublished
from pipelinerl.planning.inputs import gpus
from pipelinerl.weights.base import plan_layout
from pipelinerl.weights.timeline import timeline_of
from trainer.model import room, varlen
from trainer.model.head import linear_logprobs
from trainer.model.model import Model
from trainer.rows.arrange import arrange
from trainer.rows.packed_row import PackedRow
from trainer.weights.async_publisher import AsyncPublisher
from trainer.weights.publisher import Publisher

ROW_TOKENS = {"cpu": 512, "cuda": 16384}
SAMPLE_TOKENS = {"cpu": 64, "cuda": 1024}
REPETITIONS = 3
DEADLINE_S = 60.0
NO_DEVICE = "attention in one call, memory and MFU of a device, and a policy copied from one: torch finds no CUDA device"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer.gpu_checks", description=__doc__)
    parser.add_argument("--model", type=Path, help="a model's folder; default: the demo's, 1 M parameters")
    folder: Path | None = parser.parse_args().model
    with tempfile.TemporaryDirectory() as temporary:
        if folder is None:
            make_model(folder := Path(temporary) / "model", seed=0)
        print(json.dumps(measure(folder, run_folder=Path(temporary))))


def measure(folder: Path, *, run_folder: Path) -> dict[str, Any]:
    """Seconds of a row, forward and backward, alone and while a policy is written; of its head alone; what attends; the peak of memory."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    model = Model(folder, dtype="bfloat16" if kind == "cuda" else "float32", temperature=1.0, device=device)
    longest = json.loads((folder / "config.json").read_text()).get("max_position_embeddings", 2048)
    row = _row(model, num_tokens=ROW_TOKENS[kind], sample_tokens=min(SAMPLE_TOKENS[kind], longest))
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row_s = _seconds(functools.partial(_train, model, row))
    head: Any = model.module.get_output_embeddings()
    hidden = torch.randn(len(row.targets), head.weight.shape[1], device=device, dtype=head.weight.dtype, requires_grad=True)
    head_s = _seconds(lambda: linear_logprobs(hidden, head.weight, row.targets, temperature=1.0)[0].sum().backward())
    publish_s, speed_while_publishing = _publishing(model, row, run_folder=run_folder)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    peak_flops = _peak_flops() if kind == "cuda" else None
    num_tokens = len(row.token_ids)
    return {
        "device": kind,
        "row_s": row_s,
        "tokens_per_s": num_tokens / row_s,
        "head_s": head_s,
        "head_fraction": min(1.0, head_s / row_s),
        "publish_s": publish_s,
        "speed_while_publishing": speed_while_publishing,
        "piece_mib": room.piece_bytes(device) / 2**20,
        "attention": "in one call" if _attends_in_one_call(model) else "block by block",
        "peak_gib": (torch.cuda.max_memory_allocated() if kind == "cuda" else _peak_resident_bytes()) / 2**30,
        "mfu": None if peak_flops is None else 6 * num_parameters * num_tokens / row_s / peak_flops,
        "num_parameters": num_parameters,
        "unseen": [] if kind == "cuda" else [NO_DEVICE],
    }


def _publishing(model: Model, row: PackedRow, *, run_folder: Path) -> tuple[float, float]:
    """(seconds to write a policy, the speed of a row beside which one is written as a part of that alone); the best of a few."""
    publisher = Publisher(model.tensors, tied_names=model.tied_names, run_folder=run_folder, deadline_s=DEADLINE_S)
    publisher.fix_layout(plan_layout({name: tensor for name, tensor in model.tensors().items() if name not in model.tied_names}))
    announced: list[PolicyPublished] = []
    alone_s, beside_s = [], []

    def send(message: Any) -> None:
        announced.append(message)
        for policy in announced[-2:-1]:  # no engine reads it any more
            publisher.release(policy.buffer)

    try:
        with AsyncPublisher(publisher, sharded=None, send=send, timeline=timeline_of(model.device)) as publication:
            for version in range(1, REPETITIONS + 2):
                alone_s.append(_seconds_of(lambda: _train(model, row)))
                publication.begin(version)
                beside_s.append(_seconds_of(lambda: _train(model, row)))
                publication.wait()
    finally:
        publisher.close()
    return min(policy.publish_s for policy in announced[1:]), min(1.0, min(alone_s[1:]) / min(beside_s[1:]))


def _row(model: Model, *, num_tokens: int, sample_tokens: int) -> PackedRow:
    """Samples of one length, half prompt, half completion, laid end to end."""
    generator = np.random.default_rng(0)
    num = num_tokens // sample_tokens
    token_ids = generator.integers(0, model.num_words, num * sample_tokens, dtype=np.int32)
    loss_mask = np.tile(np.arange(sample_tokens) >= sample_tokens // 2, num)
    lengths = np.full(num, sample_tokens, np.int32)
    row = arrange(token_ids, loss_mask=loss_mask, lengths=lengths, names=[str(number) for number in range(num)], device=model.device)
    assert row is not None
    return row


def _train(model: Model, row: PackedRow) -> None:
    model.logprobs(row)[0].sum().backward()
    for parameter in model.parameters():
        parameter.grad = None


def _attends_in_one_call(model: Model) -> bool:
    config: Any = model.module.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query = torch.empty(1, 1, size, dtype=model.dtype)
    return varlen.has_kernel(model.device) and varlen.serves(query, query)


def _peak_flops() -> float | None:
    """Dense bfloat16 products of this GPU by its maker's data sheet; None for one that the planner's table lacks."""
    name = torch.cuda.get_device_name().lower()
    return next((float(gpu["peak_bf16"]) for key, gpu in gpus().items() if key in name), None)


def _seconds(work: Callable[[], object]) -> float:
    """The least of a few, after one that warms up."""
    return min([_seconds_of(work) for _ in range(REPETITIONS + 1)][1:])


def _seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    _finish()
    return time.perf_counter() - started


def _finish() -> None:
    """Wait for what this thread has launched, and not for a policy that is written beside it."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def _peak_resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
