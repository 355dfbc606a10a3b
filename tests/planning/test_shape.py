"""Parameters counted from a config.json: transformers' own modules, and the totals that the Hub tells of public models, are the measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from pipelinerl.errors import ConfigError
from pipelinerl.planning.shape import DENSE, MIXTURES, known_models, read_shape, shape_of

HUB = {
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
}
"""`safetensors` total of each model's page."""
_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 120,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 20, "first_k_dense_replace": 1}
_ROUTED = {"n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 4}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 24}),
    ("mistral", {"head_dim": 32}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 32, "attention_bias": True}),
    ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]}),
    ("qwen3_moe", {**_EXPERTS, "head_dim": 32, "decoder_sparse_step": 2}),
    ("deepseek_v2", {**_LATENT, **_ROUTED, "q_lora_rank": None}),
    ("deepseek_v3", {**_LATENT, **_ROUTED, "q_lora_rank": 12, "n_group": 1, "topk_group": 1}),
]


@pytest.mark.parametrize(("kind", "more"), CASES)
def test_parameters_are_those_of_transformers(kind: str, more: dict[str, Any]) -> None:
    tree = {"tie_word_embeddings": False, **_TINY, **more}
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**tree))
    assert shape_of(tree | {"model_type": kind}, origin="x").parameters == sum(one.numel() for one in module.parameters())


def test_every_family_that_transformers_has_is_compared() -> None:
    assert {kind for kind, _ in CASES} == {kind for kind in DENSE + MIXTURES if kind in CONFIG_MAPPING}


@pytest.mark.parametrize("name", HUB)
def test_parameters_of_the_table_are_those_of_the_hub(name: str) -> None:
    assert read_shape(Path(name)).parameters == HUB[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen/Qwen3-235B-A22B", "deepseek-ai/DeepSeek-V3"])
def test_large_mixtures_are_counted_as_transformers_builds_them(name: str) -> None:
    tree = dict(known_models()[name])
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(CONFIG_MAPPING[tree.pop("model_type")](**tree))
    assert read_shape(Path(name)).parameters == sum(one.numel() for one in module.parameters())


def test_the_widths_of_latent_attention_by_hand() -> None:
    """DeepSeek-V3 (arXiv 2412.19437 section 4.2): 128 heads of 128 + 64 for queries, 128 for values; a cache of 512 + 64."""
    shape = read_shape(Path("DeepSeek-V3"))
    assert (shape.query_width, shape.value_width, shape.cache_width, shape.is_latent) == (24_576, 16_384, 576, True)
    assert shape.matmul_parameters / 1e9 == pytest.approx(36.6, abs=0.1), "37 B with the input embeddings"
    assert shape.inner_width == pytest.approx((3 * 18_432 + 58 * 9 * 2048) / 61)


def test_a_model_may_be_named_without_its_owner_and_an_unknown_one_is_answered_with_the_nearest() -> None:
    assert read_shape(Path("qwen2.5-7b")) == read_shape(Path("Qwen/Qwen2.5-7B"))
    with pytest.raises(ConfigError, match=r"no model of the table; did you mean Qwen2\.5-7B or "):
        read_shape(Path("Qwen2.5-7"))


def test_an_unknown_family_is_refused_unless_its_weights_tell_the_parameters(tmp_path: Path) -> None:
    tree = {"model_type": "gpt2", "hidden_size": 8, "vocab_size": 5}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match="model_type 'gpt2' is not one whose parameters are counted here"):
        read_shape(tmp_path)
    assert shape_of(tree, origin="x", parameters=123).parameters == 123
