"""Tiny random models of the families in `pipelinerl.config.families`, each with what is peculiar to its family switched on.

Windows are shorter than the sequences that tests sample, heads do not divide the hidden size where the family allows it, and weights are
large enough that a wrong mask, scale or name moves log-probabilities by far more than rounding.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from tests.tiny_models import make_tokenizer

WINDOW = 16
"""Tokens that a layer with a sliding window sees."""
_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MIXED = ["sliding_attention", "full_attention"]
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "rope_parameters": _ROPE
    | {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 64,
    },
}
RECIPES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 64, "tie_word_embeddings": True},
    "gemma2": {
        "head_dim": 64,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "layer_types": _MIXED,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "head_dim": 64,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "layer_types": _MIXED,
        "rope_parameters": {"full_attention": _ROPE | {"rope_theta": 1e6}, "sliding_attention": _ROPE},
    },
    "mistral": {"head_dim": 64, "sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW, "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}},
    "smollm3": {"tie_word_embeddings": True, "no_rope_layers": [1, 0]},
    "olmo2": {},
    "granite": {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3, "logits_scaling": 4.0},
    "glm4": {"head_dim": 64, "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}},
    "qwen3_moe": {"head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "gpt_oss": {
        "head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": _MIXED,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True},
}
"""By `model_type`: what a model of the family has beside the common sizes."""


def make_folder(folder: Path, *, model_type: str, seed: int = 0, **overrides: Any) -> Path:
    """Write a random model of a family, by transformers' own configuration and model classes, and a tokenizer of single characters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(model_type, **_SIZES | RECIPES[model_type] | overrides)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("norm.weight", "layernorm.weight", ".bias", "sinks")):  # at their defaults, leaving them out goes unseen
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder
