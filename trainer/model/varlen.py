"""Attention of all pieces of a row in one call: torch's variable-length attention, which computes on CUDA devices alone.

The form in `trainer.model.attention` calls torch once for each shape of piece, with a mask where a piece sees more than itself; a device is
idle between the calls, and a mask keeps it from its fastest kernel. Here the pieces lie end to end, and two lists say where the queries and
the keys of each begin. It is chosen where it can compute the same; that form is what the tests compare it with.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Sequence

import torch
from torch.nn.attention.varlen import varlen_attn

from trainer.rows.packed_row import Block

MOST_HEAD_SIZE = 256
"""Of the kernel behind it (FlashAttention 2); sizes are multiples of 8."""
_LEAST_CAPABILITY = (8, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The pieces of a row, as variable-length attention takes them."""

    queries: torch.Tensor
    """[n + 1] int32: where the queries of each piece begin in the layout, and the end of the last."""
    keys: torch.Tensor
    """[n + 1] int32: the same of the keys that it sees."""
    most_queries: int
    """Of one piece."""
    most_keys: int
    seen: torch.Tensor | None
    """[keys] int64, where the keys of all pieces are in the layouts of all ranks that share the row, joined; None: in this rank's, as they
    lie there."""


def spans_of(blocks: Sequence[Block], *, device: torch.device, first: int = 0) -> Spans:
    """Lay out the pieces of `blocks` on `device`; `first` is where this rank's layout begins among those that share the row."""
    lengths = [block.length for block in blocks for _ in range(block.num)]
    num_seen = [block.prefix_length + block.length for block in blocks for _ in range(block.num)]
    seen = None
    if any(block.prefix is not None for block in blocks):
        seen = torch.cat([_seen(block, first=first, device=device) for block in blocks])
    return Spans(
        queries=_ends(lengths, device=device),
        keys=_ends(num_seen, device=device),
        most_queries=max(lengths),
        most_keys=max(num_seen),
        seen=seen,
    )


def has_kernel(device: torch.device) -> bool:
    """True where this device, and this build of torch, have the kernel."""
    return device.type == "cuda" and _has_kernel(device)


def serves(query: torch.Tensor, value: torch.Tensor) -> bool:
    """True where the kernel takes queries [I, H, D] and values [keys, G, D] of this dtype and these sizes."""
    size = query.shape[-1]
    return query.dtype in (torch.bfloat16, torch.float16) and size == value.shape[-1] and size % 8 == 0 and size <= MOST_HEAD_SIZE


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: Spans, *, scaling: float, window: int | None
) -> torch.Tensor:
    """Causal attention of each piece over what it sees: [I, H, D].

    `query` [I, H, D]; `keys` and `values` [tokens, G, D], those that `spans.seen` points into. The last query of a piece sees all its keys,
    the one before it all but the last; with a `window`, each so many at most, itself included.
    """
    if spans.seen is not None:
        keys, values = keys.index_select(0, spans.seen), values.index_select(0, spans.seen)
    found = varlen_attn(
        query,
        keys,
        values,
        spans.queries,
        spans.keys,
        spans.most_queries,
        spans.most_keys,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    assert isinstance(found, torch.Tensor)
    return found


def _seen(block: Block, *, first: int, device: torch.device) -> torch.Tensor:
    own = torch.arange(first + block.start, first + block.start + block.num * block.length, device=device)
    if block.prefix is None:
        return own
    return torch.cat((block.prefix.view(block.num, -1), own.view(block.num, -1)), 1).flatten()


def _ends(lengths: Sequence[int], *, device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    is_new = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return is_new and torch.version.hip is None and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
