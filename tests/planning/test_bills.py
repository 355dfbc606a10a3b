"""Memory bills of a 7 B, a 32 B, a 235 B and a 671 B run, worked by hand, and what transformers' modules really keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from pipelinerl.algorithms.methods import method_of
from pipelinerl.engine.budget import plan_budget
from pipelinerl.planning.formulas import SHEET
from pipelinerl.planning.inputs import LOGIT_NUMBERS, gpu_inputs, run_inputs
from pipelinerl.planning.shape import known_models, read_shape, shape_of
from tests.planning.runs import config_of, figures_of, inputs_of
from trainer.model import room

GB = 1e9


def test_the_bill_of_7b_sharded_over_four_beside_engines_of_one() -> None:
    """N = 7.6156 B. A piece is float32: 4 N / 4 of weights, as much of gradients, 8 N / 4 of moments. An engine: 2 N, and 2 N staged.

    A token of the KV cache: 28 layers, 4 heads of keys and of values of 128, 2 bytes: 57,344. Activations of 4,096 tokens, layers computed
    again: 28 x 3,584 x 2 bytes of inputs, and one layer of 2 x 3,584 x (4 + 2 x 2) + 2 x (2 x 3,584 + 1,024 + 4 x 18,944) bytes.
    """
    run = {
        "trainer": {"ranks": 4, "parallel": {"shard": 4}, "activation_checkpointing": "full"},
        "batch": {"max_tokens": 4096},
        "engine": {"count": 4},
    }
    found = figures_of("Qwen2.5-7B", gpu="h200", **run)
    assert found["trainer_weights_bytes"] == found["trainer_gradients_bytes"] == 7_615_616_512
    assert found["trainer_optimizer_bytes"] == 15_231_233_024
    assert found["engine_weights_bytes"] == found["staged_bytes"] == 15_231_233_024
    assert found["kv_token_bytes"] == 57_344
    assert found["layer_kept_bytes"] == 57_344 + 167_936 == 225_280
    assert found["activation_bytes"] == 4096 * (28 * 3584 * 2 + 225_280)
    assert found["published_bytes"] == 3 * 15_231_233_024, "CUDA IPC keeps three policies on the first rank's GPU"
    assert found["head_bytes"] == 3 * 4 * 2**23 + 2 * 4096 * 3584 * 2


def test_tables_of_logits_are_no_longer_than_a_row() -> None:
    """128 tokens of 49,152 words are 6.3 M numbers, less than one piece of 8.4 M."""
    found = figures_of("SmolLM2-135M", batch={"max_tokens": 128}, rollout={"max_tokens": 64})
    assert found["head_bytes"] == 3 * 4 * 128 * 49_152 + 2 * 128 * 576 * 2


def test_the_bill_of_32b_over_tensor_parallel_ranks() -> None:
    """N = 32.7639 B, whole tensors in 16 bits over 8 ranks: 2 N / 8, 4 N / 8 and (8 + 4) N / 8, which is 18 N / 8 = 73.72 GB.

    Engines over 4: 2 N / 4 = 16.38 GB; a token 64 layers x 8 heads x 128 x 2 x 2 bytes = 262,144, over 4 ranks 65,536.
    """
    found = figures_of(
        "Qwen2.5-32B",
        trainer={"ranks": 8, "parallel": {"tensor": 8}},
        engine={"count": 2, "options": {"tensor_parallel_size": 4}},
    )
    state = found["trainer_weights_bytes"] + found["trainer_gradients_bytes"] + found["trainer_optimizer_bytes"]
    assert state / GB == pytest.approx(73.72, abs=0.01)
    assert found["gathered_bytes"] == 0
    assert found["engine_weights_bytes"] / GB == pytest.approx(16.38, abs=0.01)
    assert found["kv_token_bytes"] == 65_536
    assert (
        found["published_bytes"] / GB == pytest.approx(196.58, abs=0.01) if found["chosen_transport"] == 0 else not found["published_bytes"]
    )


def test_the_bill_of_235b_with_experts_apart() -> None:
    """Experts: 94 x 128 x 3 x 4,096 x 1,536 = 227.096 B of 235.094 B. Sharded over 64, experts over all 64 too: 16 N / 64 = 58.77 GB.

    Without sharding, 8 experts' ranks in each of 8 places of a pipeline: the first has 12 layers, an eighth of their experts, and one of
    two tables of embeddings.
    Engines over 16 (8 in one stage): 29.39 GB; a token 94 / 2 layers x 1,024 numbers x 2 bytes, over the 4 heads of keys: 24,064.
    """
    engine = {"count": 1, "options": {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}}
    found = figures_of("Qwen3-235B-A22B", trainer={"ranks": 64, "parallel": {"shard": 64, "expert": 8}}, engine=engine)
    state = found["trainer_weights_bytes"] + found["trainer_gradients_bytes"] + found["trainer_optimizer_bytes"]
    assert state / GB == pytest.approx(58.77, abs=0.01)
    assert found["engine_weights_bytes"] / GB == pytest.approx(29.39, abs=0.01)
    assert found["kv_token_bytes"] == 94 / 2 * 1024 * 2 / 4
    apart = figures_of("Qwen3-235B-A22B", trainer={"ranks": 64, "parallel": {"pipeline": 8, "expert": 8}}, engine=engine)
    experts = 94 * 128 * 3 * 4096 * 1536
    table = 151_936 * 4096
    assert apart["rank_parameters"] == pytest.approx(12 / 94 * (235_093_634_560 - experts - 2 * table + experts / 8) + table)


def test_the_bill_of_671b_with_a_latent_cache() -> None:
    """N = 671.026 B, sharded over 352, of which 256 hold an expert of each layer: 16 (N - X) / 352 + 16 X / 256 = 41.65 GB.
    Engines over 64 = 8 x 8: 2 N / 64 = 20.97 GB, and as much staged.

    A latent vector is on every rank of a stage, however many share its heads: 61 / 8 layers x 576 x 2 bytes = 8,784.
    """
    found = figures_of(
        "DeepSeek-V3",
        trainer={"ranks": 352, "parallel": {"shard": 352, "expert": 32}},
        engine={"count": 2, "options": {"tensor_parallel_size": 8, "pipeline_parallel_size": 8}},
    )
    state = found["trainer_weights_bytes"] + found["trainer_gradients_bytes"] + found["trainer_optimizer_bytes"]
    assert state / GB == pytest.approx(41.65, abs=0.01)
    assert found["engine_weights_bytes"] / GB == found["staged_bytes"] / GB == pytest.approx(20.97, abs=0.01)
    assert found["kv_token_bytes"] == 8784
    assert found["engine_rank_room"] > 0


def test_a_second_model_that_is_trained_doubles_the_state_and_a_reference_adds_weights() -> None:
    layout = {"ranks": 4, "parallel": {"shard": 4}}
    plain = figures_of("Qwen2.5-7B", trainer=layout)
    found = figures_of("Qwen2.5-7B", trainer=layout, algorithm={"name": "ppo"})
    assert found["critic_bytes"] == sum(plain[f"trainer_{part}_bytes"] for part in ("weights", "gradients", "optimizer"))
    kl = {"name": "grpo", "overrides": {"kl": "k3"}}
    with_reference = figures_of("Qwen2.5-7B", trainer=layout, algorithm=kl, reference={"path": "Qwen/Qwen2.5-7B"})
    assert with_reference["reference_bytes"] == 2 * 7_615_616_512 / 4
    hosted = figures_of("Qwen2.5-7B", algorithm=kl, reference={"path": "Qwen/Qwen2.5-7B", "offload": True})
    assert (hosted["reference_bytes"], hosted["offloaded_bytes"]) == (0, 2 * 7_615_616_512)


def test_what_is_offloaded_leaves_the_gpu_and_is_on_the_host() -> None:
    layout = {"ranks": 4, "parallel": {"shard": 4}}
    plain, found = (figures_of("Qwen2.5-7B", trainer=layout | more) for more in ({}, {"offload": "optimizer"}))
    assert found["trainer_optimizer_bytes"] == 0
    assert found["trainer_gradients_bytes"] == plain["trainer_gradients_bytes"], "the device keeps the gradients"
    assert found["offloaded_bytes"] == 12 * 7_615_616_512 / 4


def test_the_published_rule_of_sixteen_bytes_by_parts() -> None:
    """70 B sharded: 16 N = 1,120 GB in all; engines 2 N = 140 GB; a critic as much again (background notes, section 1)."""
    given = {"parameters": 70e9, "trained_parameters": 70e9, "policy_parameters": 70e9, "expert_parameters": 0.0}
    found = SHEET.evaluate(
        inputs_of("Llama-3.1-70B", trainer={"ranks": 32, "parallel": {"shard": 32}}, algorithm={"name": "ppo"}, given=given)
    )
    state = sum(32 * found[f"trainer_{part}_bytes"] for part in ("weights", "gradients", "optimizer"))
    assert state / GB == pytest.approx(1120)
    assert 32 * found["critic_bytes"] / GB == pytest.approx(1120)
    assert found["policy_bytes"] / GB == pytest.approx(140)


def test_logits_are_as_the_trainer_cuts_them() -> None:
    assert 4 * LOGIT_NUMBERS == room.LEAST_BYTES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral"])
def test_activations_are_what_transformers_keeps_for_the_backward_pass(kind: str, dtype: torch.dtype) -> None:
    """Bytes of all tensors that autograd saves, of two layers less one; beside the formula's there is a number of each row and head."""
    tree: dict[str, Any] = {
        "hidden_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 352,
        "vocab_size": 64,
        "tie_word_embeddings": False,
    }
    measured = _kept(kind, tree, 2, dtype) - _kept(kind, tree, 1, dtype)
    shape = shape_of(tree | {"model_type": kind, "num_hidden_layers": 1}, origin="x")
    sizes = {"dtype_bytes": float(dtype.itemsize), "tensor": 1.0}
    formula = SHEET.evaluate({**inputs_of("Qwen2.5-0.5B"), **shape.inputs(), **sizes})["layer_kept_bytes"]
    assert formula == pytest.approx(measured, rel=0.012)


def _kept(kind: str, tree: dict[str, Any], layers: int, dtype: torch.dtype, tokens: int = 64) -> float:
    """Bytes per token."""
    sizes: dict[str, Any] = {**tree, "num_hidden_layers": layers}
    settings = CONFIG_MAPPING[kind](**sizes)
    settings._attn_implementation = "sdpa"
    module = AutoModelForCausalLM.from_config(settings).to(dtype)
    weights = {one.untyped_storage().data_ptr() for one in module.parameters()}
    seen: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor too: memory that is free again would be met twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(input_ids=torch.zeros((1, tokens), dtype=torch.long), use_cache=False)
    return sum(size for size, _ in seen.values()) / tokens


@pytest.mark.parametrize(
    ("model", "tensor", "running"), [("Qwen2.5-7B", 1, 64), ("Llama-3.1-8B", 2, 1024), ("Qwen3-30B-A3B", 4, 256), ("Qwen2.5-32B", 1, 64)]
)
def test_an_engines_gpu_is_divided_as_the_engine_does_it(tmp_path: Path, model: str, tensor: int, running: int) -> None:
    """`pipelinerl.engine.budget`, by which an engine starts, and the planner's rows. 32 B leaves no room for two."""
    (name,) = (name for name in known_models() if name.endswith(model))
    (tmp_path / "config.json").write_text(json.dumps(known_models()[name] | {"max_position_embeddings": 8192}))
    engine = {"max_running": running, "options": {"tensor_parallel_size": tensor}}
    config = config_of(str(tmp_path), rollout={"max_tokens": 4096}, engine=engine)
    found = SHEET.evaluate({**run_inputs(config, read_shape(tmp_path), method=method_of(config)), **gpu_inputs("h100")})
    total = round(found["gpu_bytes"])
    divided = plan_budget(
        config.model,
        config.engine,
        config.rollout,
        total_bytes=total,
        free_bytes=total,
        num_parameters=round(found["parameters"]),
        stages_policies=True,
    )
    assert divided is not None
    assert found["engine_weights_bytes"] == pytest.approx(divided.weights_bytes)
    assert found["engine_pass_bytes"] == pytest.approx(divided.pass_bytes)
    assert found["staged_bytes"] == pytest.approx(divided.staged_bytes)
    assert bool(found["stages_on_host"]) is divided.on_host is (model == "Qwen2.5-32B")
    assert found["kv_cache_bytes"] == pytest.approx(divided.cache_bytes)
