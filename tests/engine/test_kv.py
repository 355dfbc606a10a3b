"""The KV cache is sized from config.json: numbers by hand, and vLLM's own count of blocks for the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config import EngineSection, ModelSection, RolloutSection
from pipelinerl.engine.kv import LEAST_CPU_BYTES, KvPlan, plan_kv
from pipelinerl.errors import ConfigError

GIB = 2**30
QWEN = {
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_size": 896,
    "max_position_embeddings": 32768,
}
"""Of Qwen2.5-0.5B: 24 layers x 2 x 2 heads x 64 values x 2 bytes = 12,288 bytes a token."""


def plan(folder: Path, tree: dict[str, Any], *, memory: int = 24 * GIB, on_cpu: bool = True, **sections: dict[str, Any]) -> KvPlan | None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tree))
    return plan_kv(
        ModelSection.model_validate({"path": folder} | sections.get("model", {})),
        EngineSection.model_validate(sections.get("engine", {})),
        RolloutSection.model_validate(sections.get("rollout", {})),
        memory_bytes=memory,
        on_cpu=on_cpu,
    )


def test_the_cache_holds_the_sequences_that_are_decoded_at_once(tmp_path: Path):
    found = plan(tmp_path, QWEN, engine={"max_running": 8}, rollout={"max_tokens": 512})
    assert found is not None
    assert (found.token_bytes, found.block_tokens, found.context_tokens) == (12_288, 128, 32_768)
    assert found.sequence_bytes(1) == 128 * 12_288
    assert found.least_bytes == (32_768 + 128) * 12_288
    assert found.cache_bytes == found.least_bytes, "8 sequences of 1,024 tokens take 100 MB; one of the whole context takes 404 MB"
    wide = plan(tmp_path, QWEN, engine={"max_running": 64}, rollout={"max_tokens": 1024}, model={"max_tokens": 4096})
    assert wide is not None
    assert wide.cache_bytes == (64 * 2048 + 128) * 12_288
    assert wide.num_sequences(2048) == 64
    assert wide.why == "engine.max_running = 64 sequences of 2,048 tokens"


def test_a_small_model_keeps_the_cache_it_had(tmp_path: Path):
    found = plan(tmp_path, QWEN | {"num_hidden_layers": 1, "max_position_embeddings": 64})
    assert found is not None
    assert found.cache_bytes == LEAST_CPU_BYTES


def test_caches_keep_to_their_part_of_the_memory(tmp_path: Path):
    found = plan(tmp_path, QWEN, memory=8 * GIB, engine={"max_running": 256, "count": 2}, model={"max_tokens": 4096})
    assert found is not None
    assert found.cache_bytes == GIB
    assert found.why == "25% of this machine's 8.0 GiB over 2 engine ranks"


def test_a_context_that_has_no_room_is_told_with_the_number_that_has(tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        plan(tmp_path, QWEN, memory=GIB)
    message = str(refused.value)
    assert message.startswith("model.max_tokens: one sequence of 32,768 positions takes 404,226,048 bytes of KV cache")
    assert "Set model.max_tokens to 21,632 or less, or engine.kv_cache_bytes to 404226048 or more." in message
    fitting = plan(tmp_path, QWEN, memory=GIB, model={"max_tokens": 21_632})
    assert fitting is not None
    assert fitting.least_bytes <= GIB // 4 < fitting.least_bytes + 128 * 12_288, "and no block more would fit"
    with pytest.raises(ConfigError, match=r"engine.kv_cache_bytes is 67,108,864 \(64.0 MiB\): not one would fit"):
        plan(tmp_path, QWEN, engine={"kv_cache_bytes": 64 << 20})
    assert plan(tmp_path, QWEN, memory=GIB, engine={"kv_cache_bytes": 404_226_048}) is not None


@pytest.mark.parametrize(
    ("changes", "sections", "token_bytes"),
    [
        ({}, {"model": {"dtype": "float32"}}, 24_576),
        ({}, {"engine": {"options": {"kv_cache_dtype": "fp8"}}}, 6_144),
        ({}, {"engine": {"options": {"tensor_parallel_size": 2}}}, 6_144),
        ({}, {"engine": {"options": {"pipeline_parallel_size": 2}}}, 6_144),
        ({"head_dim": 128}, {}, 24_576),
        ({"num_key_value_heads": None}, {}, 86_016),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, {}, 27_648),
        ({"num_hidden_layers": None, "text_config": {"num_hidden_layers": 12}}, {}, 6_144),
        ({"layer_types": ["full_attention", "sliding_attention"]}, {}, 12_288),
    ],
    ids=["float32", "fp8", "tensor", "pipeline", "head_dim", "multi_head", "latent", "nested", "sliding"],
)
def test_what_a_token_takes(tmp_path: Path, changes: dict[str, Any], sections: dict[str, Any], token_bytes: int):
    found = plan(tmp_path, QWEN | changes, **sections)
    assert found is not None
    assert found.token_bytes == token_bytes


def test_nothing_is_said_of_a_model_that_keeps_states(tmp_path: Path):
    assert plan(tmp_path, QWEN | {"layer_types": ["linear_attention", "full_attention"]}) is None
    assert plan(tmp_path, {"model_type": "nobodys"}) is None


def test_a_gpus_cache_is_vllms_own_choice(tmp_path: Path):
    found = plan(tmp_path, QWEN, on_cpu=False)
    assert found is not None
    assert found.cache_bytes is None
    assert found.num_sequences(1024) is None
    assert found.sequence_bytes(17) == 32 * 12_288


@pytest.mark.vllm
@pytest.mark.slow
def test_a_model_of_8192_positions_is_served_on_a_cpu_and_vllm_counts_as_we_do(tmp_path: Path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.real_engine import vllm_engine
    from tests.tiny_models import make_tokenizer

    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}  # with 4 layers in float32, 16 KiB a token
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "max_position_embeddings": 8192,
    }
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, eos_token_id=2, bos_token_id=1, pad_token_id=0)).save_pretrained(tmp_path)
    make_tokenizer(tmp_path)
    expected = plan_kv(
        ModelSection.model_validate({"path": tmp_path, "dtype": "float32"}),
        EngineSection.model_validate({}),
        RolloutSection.model_validate({}),
        memory_bytes=24 * GIB,
        on_cpu=True,
    )
    assert expected is not None
    assert expected.least_bytes > 64 << 20, "with the cache of before, vLLM refused"
    with vllm_engine(tmp_path) as engine:
        assert engine.limits.max_model_tokens == 8192
        cache = engine._llm.vllm_config.cache_config  # pyright: ignore[reportPrivateUsage]
        assert cache.block_size == expected.block_tokens
        assert expected.cache_bytes is not None
        assert cache.num_gpu_blocks == expected.cache_bytes // (expected.block_tokens * expected.token_bytes)
