"""What a GPU of an engine holds: the figures worked by hand from Qwen3-8B's published config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config import EngineSection, ModelSection, RolloutSection
from pipelinerl.engine.budget import LIBRARY_BYTES, Budget, plan_budget
from pipelinerl.errors import ConfigError

GIB = 1 << 30
QWEN3_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
NUM_PARAMETERS = 8_190_735_360
WEIGHTS = 2 * NUM_PARAMETERS
PASS = 8192 * 2 * (3 * 4096 + 3 * 12288) + 64 * 151936 * 26
"""The feed-forward layer is the largest; 64 rows are sampled."""
TOKEN = 36 * 2 * 8 * 128 * 2


def budget(
    folder: Path, *, total: int, free: int | None = None, stages: bool = True, config: dict[str, Any] | None = None, **engine: Any
) -> Budget:
    (folder / "config.json").write_text(json.dumps(QWEN3_8B | (config or {})))
    found = plan_budget(
        ModelSection.model_validate({"path": folder}),
        EngineSection.model_validate(engine),
        RolloutSection.model_validate({}),
        total_bytes=total,
        free_bytes=total if free is None else free,
        num_parameters=NUM_PARAMETERS,
        stages_policies=stages,
    )
    assert found is not None
    return found


def test_the_next_policy_has_its_room_before_the_cache_takes_the_rest(tmp_path: Path):
    total = 80 * GIB
    found = budget(tmp_path, total=total)
    assert (found.weights_bytes, found.staged_bytes, found.pass_bytes, found.on_host) == (WEIGHTS, WEIGHTS, PASS, False)
    assert found.cache_bytes == total - 2 * WEIGHTS - PASS - LIBRARY_BYTES - int(0.04 * total)
    taken = found.weights_bytes + found.staged_bytes + found.pass_bytes + found.cache_bytes + LIBRARY_BYTES
    assert taken <= total, "vLLM by itself takes 0.92 of it, and leaves 6.4 GiB for a policy of 15.3 GiB"
    assert "the next policy 15.3 GiB" in str(found)
    assert found.utilization * total + found.staged_bytes <= total, "else vLLM refuses to start where it sees the policy's room taken"


def test_a_cache_that_could_hold_twice_as_many_sequences_as_are_decoded_says_so(tmp_path: Path):
    """43.2 GiB by 2 x 1,024 tokens of 144 KiB."""
    found = budget(tmp_path, total=80 * GIB)
    fit = found.cache_bytes // (2 * 1024 * TOKEN)
    assert fit == found.num_fit == 153
    assert "holds 153 sequences of a completion and a prompt as long, of which engine.max_running decodes 64 at once: raise it" in str(
        found
    )
    assert "raise it" not in str(budget(tmp_path, total=80 * GIB, max_running=128))


def test_what_others_hold_on_the_gpu_is_left_to_them(tmp_path: Path):
    whole, shared = (budget(tmp_path, total=80 * GIB, free=free) for free in (80 * GIB, 70 * GIB))
    assert whole.cache_bytes - shared.cache_bytes == 10 * GIB


def test_a_policy_that_would_cost_too_much_of_the_cache_waits_on_the_host_and_says_so(tmp_path: Path):
    found = budget(tmp_path, total=40 * GIB)
    assert found.on_host
    assert found.staged_bytes == 0
    assert found.cache_bytes == 40 * GIB - WEIGHTS - PASS - LIBRARY_BYTES - int(0.04 * 40 * GIB)
    assert "the next policy waits on the host" in str(found)
    little = {"max_position_embeddings": 4096}
    assert not budget(tmp_path, total=40 * GIB, config=little, max_running=1).on_host, (
        "a short sequence needs little: the pause is worth more"
    )


def test_adapters_alone_need_no_room_for_a_whole_policy(tmp_path: Path):
    found = budget(tmp_path, total=40 * GIB, stages=False)
    assert (found.staged_bytes, found.on_host) == (0, False)


def test_a_cache_that_was_asked_for_is_given_and_the_policy_takes_what_is_left_or_waits_on_the_host(tmp_path: Path):
    assert budget(tmp_path, total=80 * GIB, kv_cache_bytes=8 * GIB).cache_bytes == 8 * GIB
    assert not budget(tmp_path, total=80 * GIB, kv_cache_bytes=8 * GIB).on_host
    assert budget(tmp_path, total=80 * GIB, kv_cache_bytes=50 * GIB).on_host


def test_what_fits_nowhere_is_refused_with_the_arithmetic(tmp_path: Path):
    with pytest.raises(
        ConfigError,
        match=r"20\.0 GiB of 24\.0 GiB are free; weights 15\.3 GiB.*are 19\.\d GiB; .*one sequence of 40,960 positions takes 5\.6 GiB",
    ):
        budget(tmp_path, total=24 * GIB, free=20 * GIB)
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_bytes asks for 70\.0 GiB"):
        budget(tmp_path, total=80 * GIB, kv_cache_bytes=70 * GIB)


def test_ranks_of_one_engine_each_hold_their_share(tmp_path: Path):
    found = budget(tmp_path, total=80 * GIB, options={"tensor_parallel_size": 2})
    assert found.weights_bytes == found.staged_bytes == WEIGHTS // 2
    assert found.pass_bytes == 8192 * 2 * (3 * 4096 + 3 * 12288 // 2) + 64 * 151936 * 26


def test_a_mixture_is_counted_by_the_experts_a_token_is_sent_to(tmp_path: Path):
    sizes = {"hidden_size": 2048, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144}
    found = budget(tmp_path, total=80 * GIB, config=sizes, max_running=1)
    assert found.pass_bytes == 8192 * 2 * (3 * 2048 + 8 * (3 * 768 + 2048)) + 151936 * 26


def test_a_model_that_tells_too_little_is_left_to_vllm(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "layer_types": ["mamba"]}))
    model, engine, rollout = ModelSection.model_validate({"path": tmp_path}), EngineSection(), RolloutSection()  # pyright: ignore[reportCallIssue]
    assert plan_budget(model, engine, rollout, total_bytes=GIB, free_bytes=GIB, num_parameters=1, stages_policies=True) is None
