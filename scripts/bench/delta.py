"""Measures the bytes that the changes of a policy take against the entropy bound, and how fast they are made and applied against memcpy.

Synthetic: bfloat16 weights of which a given part moves to a neighbouring value, as at the learning rates of RL. `demo`: the last of some
AdamW steps of a model of the demo's shape on the demo's task, from random weights and supervised, trained in float32 and published in
bfloat16 and in float32. The bound counts `H(d) / 8` bytes of position for each parameter and one
byte of value for each changed one (`d`: changed part); `own bound` takes the measured entropy of the values' 16 bits instead of that byte.
Delta are absolute values, so that a retry is harmless; what they cost over differences is in the ratio. All on one core.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from pipelinerl.weights.base import num_bytes, plan_layout, views
from pipelinerl.weights.codec import decode, encode
from pipelinerl.weights.delta import Delta, Space
from scripts.bench import harness
from scripts.bench.qwen3 import qwen3_config

FRACTIONS = (0.005, 0.01, 0.03, 0.05)
DEMO_LEARNING_RATES = (1e-6, 2e-4)
"""Of large models, and of the demo."""


def measure(arguments: Any) -> harness.Measured:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    size = 16_000_000 if arguments.quick else 250_000_000
    rows = [_measure(f"synthetic {fraction:.1%}", *_synthetic(size, fraction)) for fraction in FRACTIONS]
    worst = max(row["/ bound"] for row in rows)
    rows += [_measure(*policies) for policies in _demo_steps(num_steps=3 if arguments.quick else 20)]
    return harness.Measured(
        rows=rows,
        goals=[harness.at_most("bytes over the entropy bound, synthetic, largest", worst, 1.3)],
        notes=[
            "GB/s are of the whole policy's bytes: compare finds what changed, encode turns it into bytes, decode back, lay over writes it",
            "every row was applied to the old policy and gave the new one bit for bit, twice over",
        ],
    )


def _measure(label: str, old: torch.Tensor, new: torch.Tensor, layout: Any) -> harness.Row:
    space = Space(layout)
    timed = functools.partial(harness.median_s, repetitions=3)
    compare_s, positions = timed(lambda: space.compare(old, new))
    encode_s, encoded = timed(lambda: encode(space.take(new, positions)))
    decode_s, changes = timed(lambda: decode(encoded))
    target = old.clone()
    lay_over_s, _ = timed(lambda: space.lay_over(target, changes))
    if not torch.equal(target, new):
        sys.exit(f"{label}: the changes did not lead to the same bits")
    memcpy_s, _ = timed(lambda: target.copy_(new))
    count = sum(space.num_elements.values())
    bound, own_bound = _bounds(changes, count)
    speeds = {"compare": compare_s, "encode": encode_s, "decode": decode_s, "lay over": lay_over_s, "memcpy": memcpy_s}
    return {
        "what": label,
        "M parameters": count / 1e6,
        "changed": f"{changes.count / count:.3%}",
        "whole MB": len(new) / 1e6,
        "changes MB": len(encoded) / 1e6,
        "whole / changes": len(new) / len(encoded),
        "/ bound": len(encoded) / bound,
        "/ own bound": len(encoded) / own_bound,
        **{f"{name} GB/s": len(new) / 1e9 / seconds for name, seconds in speeds.items()},
    }


def _bounds(changes: Delta, count: int) -> tuple[float, float]:
    """Bytes of the position entropy plus one byte for each value, and plus the values' own entropy."""
    part = changes.count / count
    if not 0 < part < 1:
        return float(changes.count or 1), float(changes.count or 1)
    positions = count * (-part * math.log2(part) - (1 - part) * math.log2(1 - part)) / 8
    own = 0.0
    for values in changes.values.values():
        if len(values):
            high = (values >> (8 * values.itemsize - 16)).astype(np.uint16)
            counts = np.bincount(high, minlength=1 << 16)
            chances = counts[counts > 0] / len(values)
            own += len(values) * (float(-(chances * np.log2(chances)).sum()) / 8 + values.itemsize - 2)
    return positions + changes.count, positions + own


def _synthetic(size: int, fraction: float) -> tuple[torch.Tensor, torch.Tensor, Any]:
    generator = torch.Generator().manual_seed(0)
    shape = {f"layer {number}": torch.empty(size // 10, dtype=torch.bfloat16) for number in range(10)}
    layout = plan_layout(shape)
    old = torch.zeros(num_bytes(layout), dtype=torch.uint8)
    new = torch.zeros(num_bytes(layout), dtype=torch.uint8)
    for before, after in zip(views(old, layout).values(), views(new, layout).values(), strict=True):
        before.copy_(torch.randn(before.shape, generator=generator) * 0.02)
        moves = torch.rand(before.shape, generator=generator) < fraction
        after.view(torch.int16).copy_(before.view(torch.int16) + moves * torch.where(before.view(torch.int16) % 2 == 0, 1, -1))
    return old, new, layout


def _demo_steps(num_steps: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, Any]]:
    """The last of some AdamW steps of the demo's model on the demo's task, as it would be published."""
    from transformers import Qwen3ForCausalLM

    for learning_rate in DEMO_LEARNING_RATES:
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(qwen3_config(vocabulary=512, eos_token_id=None, bos_token_id=None, pad_token_id=None))
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        digits = torch.randint(3, 13, (32, 6))
        rows = torch.cat([digits, digits.sort(dim=1).values], dim=1)
        before: dict[str, torch.Tensor] = {}
        for step in range(num_steps):
            if step == num_steps - 1:
                before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            optimizer.zero_grad()
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        after = {name: parameter.detach() for name, parameter in model.named_parameters()}
        for dtype in (torch.bfloat16, torch.float32):
            layout = plan_layout({name: parameter.to(dtype) for name, parameter in after.items()})
            yield f"demo, {dtype} lr {learning_rate:g}".replace("torch.", ""), _laid(before, layout), _laid(after, layout), layout


def _laid(tensors: dict[str, torch.Tensor], layout: Any) -> torch.Tensor:
    buffer = torch.zeros(num_bytes(layout), dtype=torch.uint8)
    for name, view in views(buffer, layout).items():
        view.copy_(tensors[name])
    return buffer


if __name__ == "__main__":
    harness.run("delta", measure, works=())
