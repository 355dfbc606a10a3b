"""A folder of a model large enough to be seen in a process's memory, and made in no time: its weights are zeros."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config


def make_zeros(folder: Path, *, vocab_size: int, intermediate_size: int, num_hidden_layers: int) -> int:
    """A bfloat16 model 512 wide, of layers alike; its bytes in float32."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=512,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = {name: torch.zeros(parameter.shape, dtype=torch.bfloat16) for name, parameter in model.named_parameters()}
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return 2 * sum(tensor.nbytes for tensor in tensors.values())
