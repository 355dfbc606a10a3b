"""Samples without an advantage cost no backward pass, and the step that is taken is the same, bit by bit."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from pipelinerl.config.layout import Layout
from pipelinerl.data.expert_routes import routes_of, table_of
from pipelinerl.messages import MicroBatch
from tests.trainer.ranks import run_jobs
from tests.trainer.tiny import make_batch, make_model, make_sample, make_seal, make_step
from trainer.data.split import split_by_gradient
from trainer.parallel.replicas import Replicas

Samples = list[dict[str, np.ndarray]]


def _samples() -> Samples:
    """Six with an advantage, six without."""
    generator = np.random.default_rng(4)
    samples = [make_sample(generator, prompt=3, completion=int(generator.integers(2, 9))) for _ in range(12)]
    for sample in samples[6:]:
        sample["advantages"][:] = 0
    return samples


def _step(folder: Path, *, saves: bool, **options: object) -> tuple[dict[str, float], torch.Tensor, int]:
    """The numbers of a step over two rows with an advantage and one without, the weights after it, and how many backward passes it took."""
    samples, model = _samples(), make_model(folder)
    step, _ = make_step(model, **options)  # pyright: ignore[reportArgumentType]
    passes: list[torch.Tensor] = []
    next(iter(model.module.base_model.layers.parameters())).register_hook(passes.append)  # pyright: ignore[reportAttributeAccessIssue]
    for index, row in enumerate((samples[:3], samples[6:], samples[3:6])):
        with_gradient, without = step.split(make_batch(row, index=index))
        for part, has_gradient in ((with_gradient, True), (without, not saves)):
            if len(part.lengths):
                step.add(part, has_gradient=has_gradient)
    seal = make_seal(samples, num_micro_batches=3)
    step.train_held(seal)
    return step.finish(seal), torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), len(passes)


@pytest.mark.parametrize("method", ["grpo", "gspo", "clip_cov"])
def test_a_row_without_an_advantage_costs_no_backward_pass_and_the_step_is_the_same(folders: dict[str, Path], method: str) -> None:
    """`clip_cov` holds its rows until the step is whole."""
    options = {"objective": {"fraction": 0.2, "low": 0.0, "high": 9.0}} if method == "clip_cov" else {}
    whole, weights, num_passes = _step(folders["qwen3"], saves=False, method=method, overrides=options)
    saved, weights_saved, num_passes_saved = _step(folders["qwen3"], saves=True, method=method, overrides=options)
    assert (num_passes, num_passes_saved) == (3, 2)
    assert torch.equal(weights, weights_saved)
    assert whole.pop("num_tokens_without_gradient") == 0
    assert saved.pop("num_tokens_without_gradient") == sum(len(sample["token_ids"]) for sample in _samples()[6:])
    assert whole == saved, "denominators, entropy and mismatch are of all tokens"


def _sizes(halves: tuple[MicroBatch, MicroBatch]) -> tuple[int, int]:
    return len(halves[0].lengths), len(halves[1].lengths)


def test_a_row_is_computed_whole_where_something_else_moves_it(folders: dict[str, Path]) -> None:
    for overrides in (
        {"auxiliary": {"name": "entropy_bonus", "coef": 0.01}},
        {"objective": {"name": "kimi", "tau": 0.1}, "proximal": "engine", "weight": "none"},
    ):
        step, _ = make_step(make_model(folders["qwen3"]), overrides=overrides)
        assert _sizes(step.split(make_batch(_samples()))) == (12, 0)


def test_a_row_is_split_by_sample_with_every_column() -> None:
    samples = [_samples()[number] for number in (0, 6, 1, 7)]
    routes = routes_of(np.arange(sum(len(sample["token_ids"]) for sample in samples), dtype=np.uint8).reshape(-1, 1, 1))
    batch = msgspec.structs.replace(make_batch(samples), weights=np.arange(4, dtype=np.float32), routes=routes)
    halves = split_by_gradient(batch)
    for half, numbers in zip(halves, ((0, 2), (1, 3)), strict=True):
        expected = make_batch([samples[number] for number in numbers])
        for name in ("token_ids", "loss_mask", "logprobs", "versions", "advantages", "lengths", "rewards", "truncated", "group_ids"):
            assert getattr(half, name).tolist() == getattr(expected, name).tolist(), name
        assert half.rollout_ids == tuple(f"rollout-{number}" for number in numbers)
        assert half.weights is not None
        assert half.weights.tolist() == list(numbers)
        assert half.routes is not None
        starts = np.cumsum([0, *batch.lengths])
        tokens = [token for number in numbers for token in range(starts[number], starts[number + 1])]
        assert table_of(half.routes).ravel().tolist() == tokens


def test_an_advantage_outside_the_loss_is_none_and_a_few_tokens_are_not_worth_a_split() -> None:
    outside = _samples()[6]
    outside["advantages"][0] = 1.0
    assert _sizes(split_by_gradient(make_batch([outside]))) == (0, 1)
    generator = np.random.default_rng(0)
    long, short = (make_sample(generator, prompt=1, completion=length) for length in (88, 10))
    short["advantages"][:] = 0
    assert _sizes(split_by_gradient(make_batch([long, short]))) == (2, 0), "11 of 100 tokens"
    assert _sizes(split_by_gradient(make_batch([]))) == (0, 0)


def _train(replicas: Replicas, *, folder: Path) -> list[torch.Tensor]:
    """Three rounds, of which the second has no gradient on any rank; whole weights afterwards."""
    samples, model = _samples(), make_model(folder, replicas=replicas)
    step, _ = make_step(model, replicas=replicas)
    rounds = (samples[:3], samples[6:9]), (samples[9:11], samples[11:]), (samples[3:6], [])
    for index, round_ in enumerate(rounds):
        row = round_[replicas.number] if replicas.size > 1 else round_[0] + round_[1]
        step.add(make_batch(row, index=index), has_gradient=index != 1)
    step.train_held(make_seal(samples))
    step.finish(make_seal(samples))
    return [tensor.clone() for _, tensor in model.state()]


def test_ranks_that_share_the_weights_save_a_pass_together(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["qwen3"]
    expected = _train(Replicas(ranks=1, deadline_s=30), folder=folder)
    job = functools.partial(_train, folder=folder)
    for ranks in run_jobs([(Layout(ranks=2, shard=2), job), (Layout(ranks=2), job)], tmp_path):
        for got in ranks:
            for ours, theirs in zip(got, expected, strict=True):
                assert torch.allclose(ours, theirs, atol=5e-6)
