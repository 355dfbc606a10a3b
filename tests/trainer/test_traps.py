"""Every trap that was met while trainers were tried out, and the test that shows we are not in it.

Traps of engines that are not used here (Megatron-Core's CUDA calls, torchtitan's backends) are left out.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelinerl.config.file import parse
from pipelinerl.errors import ConfigError
from tests.trainer.tiny import make_model, make_sample, packed_logprobs

TRAPS = {
    "transformers' style for the norms of queries and keys sums the gradient collected so far at every backward pass: the second row of a"
    " step comes out wrong": "test_layouts:test_a_layout_trains_as_one_process",  # tensor 2, qwen3, seven rows a step
    "a shard cut out of a loaded file is a view into all of it: no memory is saved, and a checkpoint of it dies": (
        "test_layouts:test_a_layout_trains_as_one_process"  # held_bytes
    ),
    "transformers sees packed samples only without a cache; with one, samples leak into each other": (
        "test_traps:test_a_model_that_would_keep_a_cache_is_told_not_to"
    ),
    "transformers guesses samples from positions, and misreads a part of a row": "test_packing:test_no_sample_sees_another",
    "attention that was not told the samples computes on": "test_packing:test_attention_that_was_not_told_the_samples_refuses",
    "autograd skips the gathering of keys where a rank's tokens see no other rank's, and the others wait for it": (
        "test_layouts:test_a_layout_trains_as_one_process"  # context 4
    ),
    "gloo knows no sum with a factor, which FSDP2 asks for where gradients are not averaged": (
        "test_layouts:test_a_layout_trains_as_one_process"  # shard 2
    ),
    "torch's total norm fails for parameters on different meshes, and counts tied or copied ones twice": (
        "test_layouts:test_a_layout_trains_as_one_process"  # grad_norm: shard 2, expert 2; pipeline 2 with tied embeddings
    ),
    "a pipeline's schedule holds to the shapes of its first pass": "test_layouts:test_a_layout_trains_as_one_process",  # pipeline 2
    "a pipeline's schedule drops the gradients that sharded weights have before a pass": (
        "test_layouts:test_a_layout_trains_as_one_process"  # pipeline 2, shard 2
    ),
    "log-probabilities in pieces and over a split vocabulary are each right, and wrong together": (
        "test_layouts:test_recomputed_layers_weights_on_the_host_and_logits_in_pieces_change_no_gradient"  # tensor 2
    ),
    "all logits at once need several times the memory of the model": "test_head:test_pieces_give_what_the_whole_table_gives",
    "two matrices packed into one are two boxes of the whole on a rank, and are saved as one": (
        "test_resharding:test_a_checkpoint_is_read_in_any_layout"
    ),
    "a checkpoint written beside training on training's own group never ends": "test_resharding:test_a_checkpoint_is_read_in_any_layout",
    "experts fused by transformers have other names than engines load": "test_publisher:test_published_bytes_are_the_model_by_name",
    "an update smaller than bfloat16 can express is lost": "test_step:test_updates_smaller_than_bfloat16_are_not_lost",
    "gradients of many rows added up in bfloat16 lose the small ones": "test_step:test_gradients_of_many_bfloat16_rows_add_up_in_float32",
    "zero bubble adds up gradients in the model's dtype": "test_traps:test_zero_bubble_is_for_float32",
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_has_its_test(trap: str) -> None:
    module, name = TRAPS[trap].split(":")
    assert callable(getattr(importlib.import_module(f"tests.trainer.{module}"), name))


def test_a_model_that_would_keep_a_cache_is_told_not_to(folders: dict[str, Path]) -> None:
    """Of two packed samples, the second is what it is alone, although the model's own setting is to keep a cache."""
    model = make_model(folders["qwen3"])
    assert model.module.config.use_cache
    seen: list[object] = []
    layer = model.module.get_submodule("model.layers.0")
    layer.register_forward_pre_hook(lambda _, args, options: seen.append(options["past_key_values"]), with_kwargs=True)
    generator = np.random.default_rng(0)
    first, second = (make_sample(generator, prompt=3, completion=4) for _ in range(2))
    with torch.no_grad():
        together, alone = packed_logprobs(model, [first, second]), packed_logprobs(model, [second])
    assert torch.allclose(together[4:], alone, atol=1e-5)
    assert seen == [None, None]


def test_zero_bubble_is_for_float32() -> None:
    tree = {
        "model": {"path": "m", "dtype": "bfloat16"},
        "data": {"source": "p.jsonl"},
        "reward": [{"function": "r.py:r"}],
        "trainer": {"ranks": 2, "parallel": {"pipeline": 2, "schedule": "zero_bubble"}},
    }
    with pytest.raises(ConfigError, match=r'bfloat16 is too coarse for that\. The nearest .*schedule = "interleaved"'):
        parse(tree, origin="my.toml")
