"""The size of an engine's KV cache, from the model's config.json alone: no torch, no vLLM, nothing loaded.

A token of a layer with attention keeps a key and a value for each of its heads of keys, in the model's dtype; with multi-head latent
attention (arXiv 2405.04434) one compressed vector and the rotary part of the key. vLLM cuts the cache into blocks, keeps one of them back,
and refuses to start unless one sequence as long as the context fits into the rest: so that is the least.

Layers with a sliding window are counted as if they kept everything, so the figure is then what is needed at most. A model with layers
that keep a state instead (Mamba, linear attention) gets no plan.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from pipelinerl.config import EngineSection, ModelSection, RolloutSection
from pipelinerl.errors import ConfigError
from pipelinerl.runtime.machine import say_bytes

LEAST_CPU_BYTES = 64 << 20
"""KV cache on a CPU of a model that needs less. More costs a small model's start time for nothing; vLLM's own default takes seconds."""
SHARE_OF_MEMORY = 0.25
"""Part of the machine's memory that the KV caches of all engines may take on a CPU. More leaves too little for weights and the trainer."""
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention", "global", "local"}
_CACHE_DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    """The KV cache of each rank of an engine."""

    token_bytes: int
    """Bytes of one token in all layers of the rank."""
    block_tokens: int
    """Tokens of one block, the unit in which a sequence is given room."""
    context_tokens: int
    """Longest sequence."""
    cache_bytes: int | None
    """None: vLLM takes what the GPU has left."""
    why: str
    """The reason for the size, for a person."""

    def sequence_bytes(self, num_tokens: int) -> int:
        """Bytes of a sequence of so many tokens, in whole blocks."""
        return -(-num_tokens // self.block_tokens) * self.block_tokens * self.token_bytes

    @property
    def least_bytes(self) -> int:
        """One sequence as long as the context, and the block that vLLM keeps back."""
        return self.sequence_bytes(self.context_tokens) + self.block_tokens * self.token_bytes

    def num_sequences(self, num_tokens: int) -> int | None:
        """The number of sequences of so many tokens that the cache holds; None where its size is not known here."""
        if self.cache_bytes is None:
            return None
        return (self.cache_bytes - self.block_tokens * self.token_bytes) // self.sequence_bytes(num_tokens)

    def longest_in(self, num_bytes: int) -> int:
        """The longest context for which so many bytes are enough, in tokens; 0 where none is."""
        return max(0, num_bytes // (self.block_tokens * self.token_bytes) - 1) * self.block_tokens


def context_of(folder: Path, *, max_tokens: int | None) -> int | None:
    """The longest sequence of a model, prompt and completion: `max_tokens`, or its own context; None where its config.json says none."""
    tree = text_tree(folder)
    return max_tokens or next((int(tree[key]) for key in _CONTEXT_KEYS if tree.get(key)), None)


def sequence_bytes_of(folder: Path, *, dtype: str, max_tokens: int | None) -> int | None:
    """Bytes of one sequence as long as the context of a model on one rank; None where its config.json does not say enough."""
    tree, context = text_tree(folder), context_of(folder, max_tokens=max_tokens)
    token_bytes = _token_bytes(tree, dtype=dtype)
    return None if context is None or token_bytes is None else context * token_bytes


def plan_kv(model: ModelSection, engine: EngineSection, rollout: RolloutSection, *, memory_bytes: int, on_cpu: bool) -> KvPlan | None:
    """Size an engine's KV cache; None where config.json does not say enough.

    By default, on a CPU, it holds `engine.max_running` sequences of a completion and a prompt as long, bounded by `SHARE_OF_MEMORY`. Raises
    `ConfigError`, naming our key and the number that would fit, where not even one sequence of the whole context has room.
    """
    tree, context = text_tree(model.path), context_of(model.path, max_tokens=model.max_tokens)
    cache_dtype = str(engine.options.get("kv_cache_dtype", "auto"))
    dtype = model.dtype if cache_dtype == "auto" else cache_dtype
    tensor = int(engine.options.get("tensor_parallel_size", 1))
    token_bytes = _token_bytes(tree, dtype=dtype, num_stages=engine.num_stages, tensor=tensor)
    if context is None or token_bytes is None:
        return None
    plan = KvPlan(
        token_bytes=token_bytes,
        block_tokens=_block_tokens(tree, engine, on_cpu=on_cpu),
        context_tokens=context,
        cache_bytes=engine.kv_cache_bytes,
        why="engine.kv_cache_bytes",
    )
    if engine.kv_cache_bytes is not None:
        _check(plan, limit=engine.kv_cache_bytes, source=f"engine.kv_cache_bytes is {engine.kv_cache_bytes:,}")
        return plan
    if not on_cpu:
        return dataclasses.replace(plan, why="what the GPU has left, by vLLM's own measure")
    num_ranks = engine.count * engine.num_ranks
    share = int(memory_bytes * SHARE_OF_MEMORY) // num_ranks
    bound = f"{SHARE_OF_MEMORY:.0%} of this machine's {say_bytes(memory_bytes)}" + (
        f" over {num_ranks} engine ranks" if num_ranks > 1 else ""
    )
    _check(plan, limit=share, source=f"{bound} is {share:,}")
    typical = min(context, 2 * rollout.max_tokens)
    wanted = engine.max_running * plan.sequence_bytes(typical) + plan.block_tokens * token_bytes
    size, why = max(
        (wanted, f"engine.max_running = {engine.max_running} sequences of {typical:,} tokens"),
        (plan.least_bytes, "one sequence as long as the context"),
        (LEAST_CPU_BYTES, "the least"),
    )
    return dataclasses.replace(plan, cache_bytes=min(size, share), why=why if size <= share else bound)


def _check(plan: KvPlan, *, limit: int, source: str) -> None:
    if plan.least_bytes <= max(limit, 0):
        return
    fits = plan.longest_in(limit)
    lower = f"Set model.max_tokens to {fits:,} or less, or" if fits else "Set"
    raise ConfigError(
        f"model.max_tokens: one sequence of {plan.context_tokens:,} positions takes {plan.least_bytes:,} bytes of KV cache"
        f" ({say_bytes(plan.least_bytes)}; {plan.token_bytes:,} a token), and {source} ({say_bytes(limit)}): not one would fit."
        f" {lower} engine.kv_cache_bytes to {plan.least_bytes} or more."
    )


def text_tree(folder: Path) -> dict[str, Any]:
    """What config.json says of the language model. Raises `ConfigError` where it cannot be read."""
    try:
        tree = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {folder / 'config.json'} cannot be read: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"model.path: {folder / 'config.json'} holds a {type(tree).__name__}, expected an object")
    return tree | inner if isinstance(inner := tree.get("text_config"), dict) else tree


def _token_bytes(tree: dict[str, Any], *, dtype: str, num_stages: int = 1, tensor: int = 1) -> int | None:
    """Bytes that a token takes in the layers of one rank, of `num_stages` times `tensor`."""
    num_layers, num_heads = tree.get("num_hidden_layers"), tree.get("num_attention_heads")
    kinds = set(tree.get("layer_types") or tree.get("layers_block_type") or ())
    if not num_layers or not num_heads or not kinds <= _ATTENTION:
        return None
    size = _CACHE_DTYPE_BYTES.get(dtype, 1)
    layers = -(-int(num_layers) // num_stages)
    if tree.get("kv_lora_rank"):
        return layers * (int(tree["kv_lora_rank"]) + int(tree.get("qk_rope_head_dim") or 0)) * size
    head_size = tree.get("head_dim") or int(tree.get("hidden_size") or 0) // int(num_heads)
    key_heads = int(tree.get("num_key_value_heads") or num_heads)
    return layers * 2 * max(1, key_heads // tensor) * int(head_size) * size or None


def _block_tokens(tree: dict[str, Any], engine: EngineSection, *, on_cpu: bool) -> int:
    """Choose a block's tokens as vLLM does: 16 on a GPU; on a CPU 128, and 16 for latent attention, whose kernel knows no other."""
    if on_cpu and tree.get("kv_lora_rank"):
        return 16
    return int(engine.options.get("block_size") or (128 if on_cpu else 16))
