"""How much memory the output head may take for tables of logits, in bytes: the one place where that is said.

On a CPU a small piece is the fastest, since it stays in the caches. On a device a small one leaves most of it idle: at 151,936 words 32 MiB
are 55 tokens, and a row of 8,192 is 149 products that each wait for the one before. There a piece takes a share of what is free. It is
rounded down to a power of two, so that rows of one run are cut alike although what is free differs a little from row to row.
"""

from __future__ import annotations

import torch

from pipelinerl.weights.device_memory import free_bytes

LEAST_BYTES = 32 << 20
"""One piece on a CPU, and the least on a device. There a larger one saves no time, and a smaller one makes thin products."""
MOST_BYTES = 1 << 30
"""One piece on a device with room: 1,766 tokens at 151,936 words, rows enough for a matrix product to keep a large device at work."""
FREE_FRACTION = 1 / 32
"""Part of a device's free memory that one piece takes. A forward pass holds two, and a whole table that is kept is as large as eight."""
KEPT_PIECES = 8
"""A whole table of so many pieces is kept for the backward pass: 256 MiB on a CPU, the completions of a row of a small model. Computing it
again is a third more work than the two products of the backward pass; a larger bound takes memory that activations want."""


def piece_bytes(device: torch.device) -> int:
    """Bytes of one piece of a table of logits on `device`."""
    if device.type != "cuda":
        return LEAST_BYTES
    share = int(free_bytes(device) * FREE_FRACTION)
    return min(MOST_BYTES, max(LEAST_BYTES, 1 << max(0, share.bit_length() - 1)))


def kept_bytes(device: torch.device) -> int:
    """Bytes up to which a whole table is kept for the backward pass."""
    return KEPT_PIECES * piece_bytes(device)
