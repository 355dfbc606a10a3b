"""Megatron-Core's names and forms of weights, and Hugging Face's: queries, keys and values are one matrix there, as are gate and up.

In the one, each group of heads that share a key has its queries' rows, then its key's, then its value's; in the other, the gate's rows come
before the other's. So a rank's piece of the fused matrix is made of its pieces of the parts, and what turns one into the other is the same
for a piece and for the whole. Knows no Megatron: a checkpoint is exported where that is not installed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

_OF_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
_OTHERS = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    "output_layer.weight": ("lm_head.weight",),
}
_BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_FUSED = {len(parts): theirs for theirs, parts in _OF_LAYER.items() if len(parts) > 1}


def parts_of(theirs: str) -> tuple[str, ...]:
    """Hugging Face's names of the weights that one of Megatron's holds, in their order in it; layers are counted from the model's first."""
    layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", theirs)
    return _OTHERS[theirs] if layer is None else tuple(f"model.layers.{layer[1]}.{name}" for name in _OF_LAYER[layer[2]])


def cut_of(theirs: str) -> int | None:
    """The dimension along which tensor parallelism cuts each part of a weight; None where every rank has the whole."""
    return None if "norm" in theirs else 1 if theirs.endswith(_BY_COLUMNS) else 0


def packed_of(theirs: str) -> int | None:
    """The dimension along which two parts of a weight lie whole, one after the other; None where none do."""
    return -2 if theirs.endswith(_FUSED[2]) else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The shape of a model's heads."""

    size: int
    queries_per_key: int

    @classmethod
    def of(cls, settings: Any) -> Heads:
        """Those of a model with transformers' `settings`."""
        size = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
        return cls(size=size, queries_per_key=settings.num_attention_heads // settings.num_key_value_heads)

    def split(self, theirs: torch.Tensor, *, num: int) -> list[torch.Tensor]:
        """Give the `num` parts of a weight, or of a piece of it: copies, where they do not lie by themselves in it."""
        if num < 3:
            return list(theirs.chunk(num))
        groups = theirs.unflatten(0, (-1, self.queries_per_key + 2, self.size))
        return [part.flatten(0, -2) for part in groups.split((self.queries_per_key, 1, 1), 1)]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make a weight, or a piece of it, of its parts."""
        if len(parts) < 3:
            return torch.cat(tuple(parts))
        queries, keys, values = parts
        of_group = [
            queries.unflatten(0, (-1, self.queries_per_key, self.size)),
            *(part.unflatten(0, (-1, 1, self.size)) for part in (keys, values)),
        ]
        return torch.cat(of_group, 1).flatten(0, 2)


def names_of(ours: Iterable[str]) -> list[str]:
    """Megatron's names of the weights that hold those of these names of Hugging Face."""
    found: dict[str, None] = {}
    single = {part: theirs for theirs, parts in _OTHERS.items() for part in parts}
    for name in ours:
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if layer is None:
            found[single[name]] = None
        else:
            found[f"decoder.layers.{layer[1]}." + next(theirs for theirs, parts in _OF_LAYER.items() if layer[2] in parts)] = None
    return list(found)
