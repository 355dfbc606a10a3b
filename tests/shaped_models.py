"""Folders of a real model's shape, whose weights are a hole in the disk: what can be known without loading them is whole."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch

from tests.tokenizers import CHATML

SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN2_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
THINKING = CHATML.replace(
    "<|im_start|>assistant\n'",
    "<|im_start|>assistant\n' + ('<think>\n\n</think>\n\n' if enable_thinking is defined and enable_thinking is false else '')",
)
"""As of Qwen3: without thoughts, an empty thought is written in front of the answer."""


def make_shaped(folder: Path, shape: dict[str, Any], *, template: str | None = CHATML) -> Path:
    """Write config.json, the headers of all weights in bfloat16, and a byte-level tokenizer that ends turns with `<|im_end|>`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    make_chat_bytes(folder, template=template)
    (folder / "config.json").write_text(json.dumps(shape | {"eos_token_id": 256, "bos_token_id": None}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    header, end = {}, 0
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and shape["tie_word_embeddings"]:
            continue
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)
    return folder


def make_chat_bytes(folder: Path, *, template: str | None) -> None:
    """Write a tokenizer of a token for each byte, and ChatML's markers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    whole.chat_template = template
    whole.save_pretrained(str(folder))
