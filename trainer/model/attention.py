"""Attention over a packed row: every sample sees itself only, and samples of equal shape are computed together.

Registered with transformers under `NAME`, so that any of its causal language models runs on it unchanged. transformers' own detection of
packed rows is not used: it guesses from positions, and with a cache switched on it lets samples see each other without a word.

Shapes: `I` tokens laid out (see `trainer.rows.arrange`), `n` pieces of a block, `L` tokens of a piece, `S` tokens it sees (prefix and own),
`H` heads, `G` heads of keys and values, `D` size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AttentionInterface

from pipelinerl.errors import ConfigError
from trainer.parallel.context import gather
from trainer.rows.packed_row import Block

NAME = "pipelinerl_packed"
SHORT = 32
"""Up to so many tokens seen, in float32 on a CPU, plain matrix products beat torch's fused attention, whose cost per piece then outweighs
its work: 256 pieces of 13 tokens take 8 ms forward and backward instead of 12; from 64 tokens on the fused one wins."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    blocks: tuple[Block, ...] | None = None,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within the `blocks` of one row. `query` [1, H, I, D], `key` and `value` [1, G, I, D]; returns [1, I, H, D].

    The ranks of `group` share the row; what a prefix names is then on any of them.

    Raises `ConfigError` for a model that needs a kind of attention not written here; computing another one would train wrongly.
    """
    if blocks is None:
        raise ConfigError(
            f"{type(module).__name__} does not hand its keyword arguments on to attention: this model cannot train packed rows"
        )
    _refuse_unknown(type(module).__name__, blocks, options)
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    everywhere: Sequence[torch.Tensor] = (keys, values)
    if group is not None:
        everywhere = gather(torch.stack((keys, values), 1), group).unbind(1)
        # This rank's own are taken from there, too: its gradient then passes the gathering on every rank, also on one whose tokens see no
        # other rank's. A rank that skipped it would leave the others waiting for its part in the backward pass.
        keys, values = (tensor[group.rank() * len(queries) :][: len(queries)] for tensor in everywhere)
    outputs = [_attend(*_pieces(block, queries, keys, values, everywhere=everywhere), scaling=scaling).flatten(0, 1) for block in blocks]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


AttentionInterface.register(NAME, packed_attention)


def _pieces(
    block: Block, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, everywhere: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Give a block's queries [n, L, H, D] and the keys and values [n, S, G, D] they see, out of those of the row ([I, heads, D]).

    `everywhere` are the keys and values of all ranks that share the row.
    """
    own = slice(block.start, block.start + block.num * block.length)
    queries, keys, values = (tensor[own].unflatten(0, (block.num, block.length)) for tensor in (query, key, value))
    if block.prefix is None:
        return [queries, keys, values]
    seen = [tensor.index_select(0, block.prefix).unflatten(0, (block.num, block.prefix_length)) for tensor in everywhere]
    return [queries, torch.cat((seen[0], keys), 1), torch.cat((seen[1], values), 1)]


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float) -> torch.Tensor:
    """Causal attention of the last L of S tokens: [n, L, H, D]."""
    num_queries, num_seen = query.shape[1], key.shape[1]
    if num_seen <= SHORT and query.dtype == torch.float32 and query.device.type == "cpu":
        return _attend_short(query, key, value, scaling=scaling)
    hides = num_seen > num_queries
    mask = torch.ones(num_queries, num_seen, dtype=torch.bool, device=query.device).tril(num_seen - num_queries) if hides else None
    output = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=not hides,
        scale=scaling,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return output.transpose(1, 2)


def _attend_short(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float) -> torch.Tensor:
    """The same, one batched matrix product per (piece, head of keys); the heads of queries that share it are rows of one matrix."""
    n, L, H, D = query.shape
    S, G = key.shape[1:3]
    hidden = torch.full((L, S), float("-inf"), device=query.device).triu(S - L + 1).repeat(H // G, 1)
    queries = query.unflatten(2, (G, H // G)).permute(0, 2, 3, 1, 4).reshape(n * G, H // G * L, D)
    keys = key.permute(0, 2, 3, 1).reshape(n * G, D, S)
    values = value.transpose(1, 2).reshape(n * G, S, D)
    weights = torch.baddbmm(hidden, queries, keys, alpha=scaling).softmax(-1)
    return torch.bmm(weights, values).view(n, G, H // G, L, D).permute(0, 3, 1, 2, 4).reshape(n, L, H, D)


def _refuse_unknown(name: str, blocks: tuple[Block, ...], options: dict[str, Any]) -> None:
    longest = max(block.prefix_length + block.length for block in blocks)
    window = options.get("sliding_window")
    if window is not None and longest > window:
        raise ConfigError(
            f"{name} attends to a window of {window} tokens and a sample has {longest}: windows are not trained; set model.max_tokens"
        )
    for option in ("softcap", "s_aux"):
        if options.get(option) is not None:
            raise ConfigError(f"{name} uses attention with {option}, which packed rows do not support: choose another model")
