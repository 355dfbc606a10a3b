"""Attention over a packed row: every sample sees itself only, and samples of equal shape are computed together.

Registered with transformers under `NAME`, so that any of its causal language models runs on it unchanged. transformers' own detection of
packed rows is not used: it guesses from positions, and with a cache switched on it lets samples see each other without a word.

Shapes: `I` tokens laid out (see `trainer.rows.arrange`), `n` pieces of a block, `L` tokens of a piece, `S` tokens it sees (prefix and own),
`H` heads, `G` heads of keys and values, `D` size of a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AttentionInterface

from pipelinerl.errors import ConfigError
from trainer.model import varlen
from trainer.model.varlen import Spans
from trainer.parallel.context import gather
from trainer.rows.packed_row import Block

NAME = "pipelinerl_packed"
SHORT = 32
"""Up to so many tokens seen, in float32 on a CPU, plain matrix products beat torch's fused attention, whose cost per piece then outweighs
its work: 256 pieces of 13 tokens take 8 ms forward and backward instead of 12; from 64 tokens on the fused one wins."""
_HARMLESS = frozenset({"dropout", "is_causal", "position_ids", "routes", "use_cache"})
"""What models hand to attention besides, and what needs nothing here: dropout is off, positions are in queries and keys already."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The kind of attention that a layer asks for."""

    scaling: float
    window: int | None = None
    """Tokens that each one sees, itself included; None: all before it."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap) (arXiv:2408.00118, section 2)."""
    sinks: torch.Tensor | None = None
    """[H] scores of a token that every head sees and that has no value (arXiv:2309.17453, learned)."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    blocks: tuple[Block, ...] | None = None,
    spans: Spans | None = None,
    group: dist.ProcessGroup | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within the `blocks` of one row. `query` [1, H, I, D], `key` and `value` [1, G, I, D]; returns [1, I, H, D].

    `spans` are the same pieces for attention in one call, where the device has it; kinds of attention that it lacks go on block by block.
    The ranks of `group` share the row; what a prefix names is then on any of them. `sliding_window`, `softcap` and `s_aux` are what
    transformers calls the parts of `Kind`.

    Raises `ConfigError` for a model that needs a kind of attention not written here; computing another one would train wrongly.
    """
    if blocks is None:
        raise ConfigError(
            f"{type(module).__name__} does not hand its keyword arguments on to attention: this model cannot train packed rows"
        )
    _refuse_unknown(type(module).__name__, attention_mask, options)
    kind = Kind(scaling=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    everywhere: tuple[torch.Tensor, ...] = (keys, values)
    if group is not None:
        everywhere = gather(torch.stack((keys, values), 1), group).unbind(1)
        # This rank's own are taken from there, too: its gradient then passes the gathering on every rank, also on one whose tokens see no
        # other rank's. A rank that skipped it would leave the others waiting for its part in the backward pass.
        keys, values = (tensor[group.rank() * len(queries) :][: len(queries)] for tensor in everywhere)
    if spans is not None and kind.softcap is None and kind.sinks is None and varlen.serves(queries, values):
        seen_keys, seen_values = (keys, values) if spans.seen is None else everywhere
        return varlen.attend(queries, seen_keys, seen_values, spans, scaling=scaling, window=sliding_window)[None], None
    outputs = [_attend(*_pieces(block, queries, keys, values, everywhere=everywhere), kind=kind).flatten(0, 1) for block in blocks]
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


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, kind: Kind) -> torch.Tensor:
    """Causal attention of the last L of S tokens: [n, L, H, D].

    With a window W, W queries at a time: those see 2 W - 1 keys at most, so that work grows with L and not with its square.
    """
    if kind.window is None:
        return _attend_all(query, key, value, kind=kind)
    if key.shape[1] <= kind.window:
        return _attend_all(query, key, value, kind=dataclasses.replace(kind, window=None))
    num_before = key.shape[1] - query.shape[1]
    outputs = []
    for start in range(0, query.shape[1], kind.window):
        end = min(start + kind.window, query.shape[1])
        seen = slice(max(0, num_before + start - kind.window + 1), num_before + end)
        outputs.append(_attend_all(query[:, start:end], key[:, seen], value[:, seen], kind=kind))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _attend_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, kind: Kind) -> torch.Tensor:
    """The same, all queries at once."""
    L, S = query.shape[1], key.shape[1]
    is_plain = kind.softcap is None and kind.sinks is None
    if not is_plain or (S <= SHORT and query.dtype == torch.float32 and query.device.type == "cpu"):
        return _attend_by_products(query, key, value, kind=kind)
    is_causal = L == S and kind.window is None
    output = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=None if is_causal else _seen(L, S, window=kind.window, device=query.device),
        is_causal=is_causal,
        scale=kind.scaling,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return output.transpose(1, 2)


def _attend_by_products(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, kind: Kind) -> torch.Tensor:
    """The same, one batched matrix product per (piece, head of keys); the heads of queries that share it are rows of one matrix.

    It holds the scores of all pairs, which torch's fused attention does not; that one knows neither soft caps nor sinks.
    """
    n, L, H, D = query.shape
    S, G = key.shape[1:3]
    hidden = torch.where(_seen(L, S, window=kind.window, device=query.device), 0.0, float("-inf")).to(query.dtype).repeat(H // G, 1)
    queries = query.unflatten(2, (G, H // G)).permute(0, 2, 3, 1, 4).reshape(n * G, H // G * L, D)
    keys = key.permute(0, 2, 3, 1).reshape(n * G, D, S)
    values = value.transpose(1, 2).reshape(n * G, S, value.shape[3])
    if kind.softcap is None:
        scores = torch.baddbmm(hidden, queries, keys, alpha=kind.scaling)
    else:
        scores = torch.tanh(torch.bmm(queries, keys) * (kind.scaling / kind.softcap)) * kind.softcap + hidden
    if kind.sinks is not None:
        sinks = kind.sinks.to(scores.dtype).view(G, H // G, 1).expand(n, G, H // G, L).reshape(n * G, H // G * L, 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)[..., :S]
    return torch.bmm(weights, values).view(n, G, H // G, L, -1).permute(0, 3, 1, 2, 4).reshape(n, L, H, -1)


def _seen(num_queries: int, num_seen: int, *, window: int | None, device: torch.device) -> torch.Tensor:
    """[L, S] bool: which of S tokens each of the last L of them sees."""
    before = num_seen - num_queries
    earlier = torch.ones(num_queries, num_seen, dtype=torch.bool, device=device).tril(before)
    return earlier if window is None else earlier.triu(before - window + 1)


def _refuse_unknown(name: str, mask: torch.Tensor | None, options: dict[str, Any]) -> None:
    """Raise `ConfigError` for attention that is told something which has no effect here."""
    unknown = sorted(option for option, value in options.items() if value is not None and option not in _HARMLESS)
    if mask is not None:
        unknown.append("a mask of the model's own")
    if unknown:
        raise ConfigError(
            f"{name} asks attention for {', '.join(unknown)}, which packed rows do not have: it would be trained on other log-probabilities"
            " than the engine's. Choose another model; docs/models.md names the families that were tried"
        )
