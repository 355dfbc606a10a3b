"""Rotary positions on a CPU, of queries that have a dimension of heads: latent attention's.

vLLM 0.32's kernel for CPUs counts heads by the last dimension alone. Of `[tokens, heads, head size]` it takes one head for all, and turns
the first head of the first token by the first position, its second head by the second position, and so on; the kernel for GPUs counts the
dimension before. Models with positions scaled by YaRN, as DeepSeek publishes them, have a class of their own in vLLM, and are not touched.
"""

from __future__ import annotations

from typing import Any

import torch


def rotate_every_head() -> None:
    """Have vLLM rotate such queries by its own plain torch code; others by its kernel, as before. Must run before a model is loaded."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kernel = RotaryEmbedding.forward_cpu
    if hasattr(kernel, "rotates_flat"):
        return

    def rotate(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        has_heads = query.dim() == positions.dim() + 2
        return self.forward_native(positions, query, key) if has_heads else rotate.rotates_flat(self, positions, query, key)  # pyright: ignore

    rotate.rotates_flat = kernel  # pyright: ignore[reportFunctionMemberAccess]
    RotaryEmbedding.forward_cpu = rotate
