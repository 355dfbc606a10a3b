"""The search against trying every pair, what it must never propose, and what stands against a placement."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pipelinerl.algorithms.methods import method_of
from pipelinerl.config.layout import Layout, problems_of
from pipelinerl.planning.formulas import SHEET
from pipelinerl.planning.inputs import COLOCATED, gpu_inputs, run_inputs
from pipelinerl.planning.plan import settings_of
from pipelinerl.planning.search import engine_obstacles, engines_of, judge, search, splits, trainers_of
from tests.planning.runs import config_of, inputs_of, shape_of

LOAD: dict[str, Any] = {"rollout": {"max_tokens": 4096}, "batch": {"max_tokens": 8192, "groups_per_step": 128}}


@pytest.mark.parametrize(("model", "gpu", "num_gpus"), [("Qwen2.5-7B", "h100", 4), ("Qwen3-8B", "a100", 6), ("Qwen3-30B-A3B", "h200", 8)])
def test_it_finds_what_trying_every_pair_finds(model: str, gpu: str, num_gpus: int) -> None:
    shape, inputs = shape_of(model), inputs_of(model, gpu=gpu, **LOAD)
    best = 0.0
    for ranks in range(1, num_gpus):
        for own, _ in trainers_of(ranks, inputs, shape):
            for engines in engines_of(num_gpus - ranks, inputs, shape):
                found = judge({**inputs, **own, **engines}, shape, num_gpus=num_gpus)
                best = max(best, found.values["run_rate"] if found.is_runnable else 0.0)
    assert best > 0
    assert search(inputs, shape, num_gpus=num_gpus)[0].values["run_rate"] == pytest.approx(best)


@pytest.mark.parametrize(("model", "num_gpus"), [("Qwen2.5-32B", 64), ("Qwen3-235B-A22B", 128), ("Qwen2.5-0.5B", 2), ("Llama-3.1-70B", 48)])
def test_whatever_it_proposes_fits_and_can_be_cut(model: str, num_gpus: int) -> None:
    shape = shape_of(model)
    found = search(inputs_of(model, **LOAD), shape, num_gpus=num_gpus)
    assert found
    for one in found:
        assert one.problems == ()
        assert one.values["used_gpus"] <= num_gpus
        assert one.values["trainer_rank_bytes"] <= one.inputs["gpu_bytes"]
        assert one.values["engine_rank_bytes"] <= one.inputs["gpu_bytes"]
        assert problems_of(one.layout, shape=shape.cut()) == []
        assert engine_obstacles(int(one.inputs["engine_tensor"]), int(one.inputs["engine_pipeline"]), shape) == []
    assert [one.values["run_rate"] for one in found] == sorted((one.values["run_rate"] for one in found), reverse=True)


def test_what_no_gpu_holds_has_no_placement() -> None:
    assert search(inputs_of("Qwen2.5-72B", gpu="l40s", **LOAD), shape_of("Qwen2.5-72B"), num_gpus=4) == []


def test_more_gpus_are_never_slower() -> None:
    shape, inputs = shape_of("Qwen2.5-7B"), inputs_of("Qwen2.5-7B", **LOAD)
    rates = [search(inputs, shape, num_gpus=num)[0].values["run_rate"] for num in (8, 16, 32, 64)]
    assert rates == sorted(rates)


def test_splits_are_whole_nodes_on_many_gpus_and_not_too_many() -> None:
    assert splits(8, 8) == [1, 2, 3, 4, 5, 6, 7]
    assert splits(64, 8) == [8, 16, 24, 32, 40, 48, 56]
    assert len(splits(2048, 8)) <= 16


def test_a_process_reward_models_gpu_is_left_to_it() -> None:
    inputs = inputs_of("Qwen2.5-7B", **LOAD) | {"prm_gpus": 1.0}
    assert search(inputs, shape_of("Qwen2.5-7B"), num_gpus=8)[0].values["used_gpus"] <= 8
    assert all(
        one.inputs["ranks"] + one.inputs["engines"] * one.values["engine_ranks"] <= 7
        for one in search(inputs, shape_of("Qwen2.5-7B"), num_gpus=8)
    )


def test_a_process_reward_model_that_its_gpu_does_not_hold_is_told() -> None:
    """72 B in 16 bits are 144 GB on one GPU, and 36 on each of four."""
    inputs = inputs_of("Qwen2.5-0.5B") | {"prm_gpus": 1.0, "prm_parameters": 72e9}
    found = judge(inputs, shape_of("Qwen2.5-0.5B"))
    assert found.values["prm_rank_room"] == pytest.approx(81_559 * 2**20 * 0.96 - 144e9 - 2 * 2**30)
    (told,) = found.problems
    assert told == "the process reward model takes 144.0 GB on each GPU: raise prm.options.tensor_parallel_size"
    assert judge(inputs | {"prm_gpus": 4.0}, shape_of("Qwen2.5-0.5B")).problems == ()


def test_what_cannot_be_run_here_is_named() -> None:
    sinks = judge(inputs_of("Qwen2.5-7B"), dataclasses.replace(shape_of("Qwen2.5-7B"), model_type="gpt_oss"))
    assert "vLLM transposes its experts" in sinks.obstacles[-1], "as pipelinerl.config.families has it"
    assert not sinks.is_runnable
    inputs = inputs_of("Qwen2.5-7B", engine={"options": {"tensor_parallel_size": 3}})
    assert judge(inputs, shape_of("Qwen2.5-7B")).obstacles[0].startswith("tensor_parallel_size = 3 does not divide 28 heads")
    for tensor, is_refused in ((1, False), (2, True)):
        turns = judge(
            inputs_of("Qwen2.5-7B", engine={"options": {"tensor_parallel_size": tensor}}) | {"mode": float(COLOCATED)},
            shape_of("Qwen2.5-7B"),
        )
        assert any("an engine of several ranks knows no sleep yet" in one for one in turns.obstacles) == is_refused


def test_what_does_not_fit_says_what_and_what_to_do() -> None:
    found = judge(inputs_of("Qwen2.5-32B", **LOAD), shape_of("Qwen2.5-32B"), num_gpus=1)
    assert found.problems[0] == "takes 2 GPUs, and there are 1"
    assert "of it optimizer state: raise trainer.parallel.shard" in found.problems[1]
    assert "tokens of KV cache, and one sequence may have 131,072: raise engine.options.tensor_parallel_size" in found.problems[2]
    activations = judge(
        inputs_of("Qwen2.5-7B", trainer={"ranks": 16, "parallel": {"shard": 16}}, batch={"max_tokens": 65536}), shape_of("Qwen2.5-7B")
    )
    assert "of it activations: set trainer.activation_checkpointing" in activations.problems[0]


def test_context_ranks_hold_whole_weights_unless_they_are_sharded() -> None:
    """As `trainer.parallel.sharding` does: shards lie over the ranks of shard and context; without them every context rank has all."""
    inputs = inputs_of("Qwen2.5-7B") | {"ranks": 4.0, "context": 2.0}
    assert SHEET.evaluate(inputs)["weight_share"] == 1
    assert SHEET.evaluate(inputs | {"shard": 2.0})["weight_share"] == 4
    assert Layout(ranks=4, shard=2, context=2).copies == 1


def test_of_engines_in_turns_and_apart_every_split_is_tried_and_all_gpus_are_used() -> None:
    inputs = inputs_of("Qwen2.5-7B", **LOAD, pipeline={"placement": "colocated"}, engine={"count": 2, "apart": 1})
    found = search(inputs, shape_of("Qwen2.5-7B"), num_gpus=8)
    assert {one.inputs["ranks"] for one in found} >= {2, 4}
    for one in found:
        assert one.inputs["ranks"] + one.inputs["engines_apart"] * one.values["engine_ranks"] == one.values["used_gpus"] == 8
        assert f"engine.apart={one.inputs['engines_apart']:.0f}" in settings_of(one)


def test_each_engine_of_a_process_reward_model_has_gpus_of_its_own_and_holds_all_of_the_model() -> None:
    """7 B in 16 bits are 14 GB, in each of three engines."""
    config = config_of("Qwen2.5-0.5B", prm={"path": "p", "count": 3})
    inputs = run_inputs(config, shape_of("Qwen2.5-0.5B"), method=method_of(config), prm_parameters=7 * 10**9) | gpu_inputs("h100")
    found = judge(inputs, shape_of("Qwen2.5-0.5B"))
    assert inputs["prm_gpus"] == 3
    assert found.values["prm_weights_bytes"] == 14e9
