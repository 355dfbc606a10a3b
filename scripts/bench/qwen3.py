"""Small Qwen3 models of random weights, by their shape."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3Config


def qwen3_config(*, vocabulary: int, hidden: int = 128, layers: int = 5, heads: int = 4, positions: int = 256, **more: Any) -> Qwen3Config:
    """Tied embeddings, an MLP three times as wide as the model; the default has 1.1 M parameters with 512 words."""
    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 0,
        **more,
    }
    return Qwen3Config(**shape)
