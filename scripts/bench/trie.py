#!/usr/bin/env python
"""Measures what computing shared beginnings once saves the trainer: rows of branching episodes laid out together, against each by itself.

`alone` computes each row in a block of its own, every token of it; `trie` is what a run does (`trainer.rows`). Both compute
log-probabilities forward and backward on one core, in turns, on a model of 1.1 M parameters. `lay out` is the time that finding the trie
takes, on the host, beside the device. `group` is what siblings of a prompt shared before there was a trie; the others are episodes whose
rows nest or branch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from scripts.bench import harness
from scripts.bench.qwen3 import qwen3_config
from trainer.model.model import Model
from trainer.rows.arrange import arrange
from trainer.rows.packed_row import PackedRow

FOLDER = Path("runs/bench-trie")
VOCABULARY = 4096
_CHANCE = np.random.default_rng(0)
Row = tuple[np.ndarray, np.ndarray]
"""[L] tokens, [L] which have a loss."""


def measure(arguments: Any) -> harness.Measured:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.manual_seed(0)
    config = qwen3_config(vocabulary=VOCABULARY, positions=8192, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(FOLDER)
    model = Model(FOLDER, dtype="float32", temperature=1.0, device=torch.device("cpu"))
    size = 1 if arguments.quick else 2
    shapes: dict[str, list[Row]] = {
        "group of 8": _rows(_shared(128 * size), [[(64 * size, True)]] * 8),
        "4 shared turns, 8 branches": _rows(_shared(128 * size) + [(64, True), (64, False)] * 4, [[(64, True)]] * 8),
        "12 turns, a row each": _nested(64 * size, num=12, said=16 * size, replied=16 * size),
        "8 sub-agents, one prompt": _rows(_shared(128 * size), [[(32, False), (64, True)]] * 8),
    }
    found, goals = [], []
    for name, rows in shapes.items():
        alone, together = [_laid_out([row]) for row in rows], _laid_out(rows)
        seconds = harness.in_turns(3, {"alone": _timed(model, alone), "trie": _timed(model, [together])})
        lay_out_s, _ = harness.median_s(lambda rows=rows: _laid_out(rows), repetitions=5)
        ratio = harness.median_ratio(seconds["alone"], seconds["trie"])
        saved = sum(len(row.token_ids) for row in alone) / len(together.token_ids)
        found.append(
            {
                "rows": name,
                "tokens alone": sum(len(row.token_ids) for row in alone),
                "tokens": len(together.token_ids),
                "fewer": saved,
                "faster": ratio,
                "trie ms": 1e3 * sorted(seconds["trie"])[1],
                "lay out ms": 1e3 * lay_out_s,
            }
        )
        judged: dict[str, Any] = {"work": harness.Work.CPU, "speeds": seconds.speeds}
        goals.append(harness.at_least(f"{name}: faster, over fewer tokens", ratio / saved, 0.5, **judged))
    return harness.Measured(rows=found, goals=goals, notes=["every token with a loss is computed in both, once"])


def _timed(model: Model, rows: Sequence[PackedRow]) -> Callable[[], float]:
    def work() -> float:
        for parameter in model.module.parameters():
            parameter.grad = None
        start = time.perf_counter()
        for row in rows:
            model.logprobs(row)[0].sum().backward()
        return time.perf_counter() - start

    work()  # warms up
    return work


def _shared(num: int) -> list[tuple[int, bool]]:
    return [(num, False)]


def _tokens(num: int) -> np.ndarray:
    return _CHANCE.integers(3, VOCABULARY, num).astype(np.int32)


def _row(parts: Sequence[tuple[np.ndarray, bool]]) -> Row:
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([np.full(len(ids), has_loss) for ids, has_loss in parts])


def _rows(shared: Sequence[tuple[int, bool]], ends: Sequence[Sequence[tuple[int, bool]]]) -> list[Row]:
    """Rows with one beginning, whose loss is in the first of them."""
    beginning = [(_tokens(num), has_loss) for num, has_loss in shared]
    rows = []
    for number, end in enumerate(ends):
        rows.append(_row([*((ids, has_loss and not number) for ids, has_loss in beginning), *((_tokens(num), loss) for num, loss in end)]))
    return rows


def _nested(prompt: int, *, num: int, said: int, replied: int) -> list[Row]:
    """A row for each turn, which repeats those before."""
    rows, context = [], [(_tokens(prompt), False)]
    for _ in range(num):
        turn = _tokens(said)
        rows.append(_row([*context, (turn, True)]))
        context += [(turn, False), (_tokens(replied), False)]
    return rows


def _laid_out(rows: Sequence[Row]) -> PackedRow:
    lengths = np.array([len(ids) for ids, _ in rows], np.int32)
    ids, loss_mask = (np.concatenate(columns) for columns in zip(*rows, strict=True))
    row = arrange(ids, loss_mask=loss_mask, lengths=lengths, names=[""] * len(rows))
    assert row is not None
    return row


if __name__ == "__main__":
    harness.run("trie", measure, works=(harness.Work.CPU,))
